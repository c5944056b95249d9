//! A server that repeats the data it receives, in any form that a server or a proxy might choose.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

/// Contained in every text of its own, whatever else is repeated.
pub(crate) const SAID: &str = "parrot";

/// The behaviour in place of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    pub(crate) at: At,
    pub(crate) form: Form,
    /// The beginning of its error.
    pub(crate) code: &'static str,
    pub(crate) quote: Quote,
    /// How many bytes of it are sent.
    pub(crate) cut: usize,
}

/// The command that gets this answer; all others are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Hello,
    Client,
    Select,
    Subscribe,
    Config,
    Script,
    Asking,
    Sentinel,
    Each,
}

/// The kind of answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Error,
    BlobError,
    Simple,
    Bulk,
    Verbatim,
    Number,
    List,
    Map,
    /// An error inside another answer.
    Nested,
    /// The script's reply, with a ledger's error in it.
    Reply,
    /// A wake-up without any answer.
    Wake,
    /// Another kind of push.
    Push,
    /// The server names another server.
    Address,
    Http,
    Noise,
}

/// How an argument is quoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quote {
    None,
    Single,
    Backtick,
    Double,
    Upper,
    Percent,
    Hex,
}

/// Closes the port when dropped.
pub(crate) struct EchoServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl EchoServer {
    pub(crate) async fn start(echo: Echo) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = Arc::new(Server {
            echo,
            address,
            login: Mutex::default(),
        });
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, server.clone()));
            }
        });
        Self { address, task }
    }

    pub(crate) fn host(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Server {
    echo: Echo,
    address: SocketAddr,
    /// The credentials received.
    login: Mutex<Vec<String>>,
}

async fn serve(mut stream: TcpStream, server: Arc<Server>) {
    let mut bytes = Vec::new();
    let mut channels = Vec::new();
    loop {
        while let Some((command, length)) = command(&bytes) {
            bytes.drain(..length);
            if stream
                .write_all(&server.answer(&command, &mut channels))
                .await
                .is_err()
            {
                return;
            }
        }
        if !matches!(stream.read_buf(&mut bytes).await, Ok(1..)) {
            return;
        }
    }
}

/// The first command and its length.
fn command(bytes: &[u8]) -> Option<(Vec<String>, usize)> {
    let (count, mut rest) = number(bytes)?;
    let mut command = Vec::new();
    for _ in 0..count {
        let (length, after) = number(rest)?;
        let (argument, after) = after.split_at_checked(length + 2)?;
        command.push(String::from_utf8_lossy(&argument[..length]).into_owned());
        rest = after;
    }
    Some((command, bytes.len() - rest.len()))
}

/// The number in the first line, and the rest.
fn number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    let number = str::from_utf8(&bytes[1..end]).ok()?.parse().ok()?;
    Some((number, &bytes[end + 2..]))
}

impl Server {
    fn answer(&self, command: &[String], channels: &mut Vec<String>) -> Vec<u8> {
        let name = command.first().map(|name| name.to_uppercase());
        let at = match name.as_deref().unwrap_or_default() {
            "HELLO" | "AUTH" => At::Hello,
            "CLIENT" => At::Client,
            "SELECT" => At::Select,
            "SUBSCRIBE" => At::Subscribe,
            "CONFIG" => At::Config,
            "ASKING" => At::Asking,
            "SENTINEL" => At::Sentinel,
            _ => At::Script,
        };
        if at == At::Hello {
            *self.login() = command.to_vec();
        }
        if at == At::Subscribe {
            *channels = command[1..].to_vec();
        }
        if self.echo.at == at || self.echo.at == At::Each {
            return self.repeat(channels.first().map_or("", String::as_str));
        }
        match at {
            At::Hello => "%2\r\n+server\r\n+redis\r\n+role\r\n+master\r\n".into(),
            // Each channel, or the connection is never used.
            At::Subscribe => (1..)
                .zip(channels)
                .map(|(count, channel)| {
                    format!(">3\r\n+subscribe\r\n{}:{count}\r\n", bulk(channel))
                })
                .collect::<String>()
                .into(),
            At::Config => "%0\r\n".into(),
            At::Sentinel => {
                let port = self.address.port().to_string();
                format!("*2\r\n{}{}", bulk("127.0.0.1"), bulk(&port)).into()
            }
            At::Script => "-LOADING it is not here yet\r\n".into(),
            _ => "+OK\r\n".into(),
        }
    }

    /// Repeats everything known about the login, in the chosen form.
    fn repeat(&self, channel: &str) -> Vec<u8> {
        let echo = &self.echo;
        let arguments = self.login().clone();
        let arguments = arguments.iter().map(|argument| echo.quote.of(argument));
        let words: Vec<_> = arguments
            .map(|argument| format!("{SAID} {argument}"))
            .collect();
        let words = format!(
            "{} unknown command `HELLO`, with args beginning with: {}",
            echo.code,
            words.join(" ")
        );
        let words = words.trim_start();
        let mut end = echo.cut.min(words.len());
        while !words.is_char_boundary(end) {
            end -= 1;
        }
        let words = &words[..end];
        match echo.form {
            Form::Error => format!("-{words}\r\n"),
            Form::BlobError => format!("!{}\r\n{words}\r\n", words.len()),
            Form::Simple => format!("+{words}\r\n"),
            Form::Bulk => bulk(words),
            Form::Verbatim => format!("={}\r\ntxt:{words}\r\n", words.len() + 4),
            Form::Number => format!("({words}\r\n"),
            Form::List => format!("*2\r\n{}{}", bulk(words), bulk(words)),
            Form::Map => format!("%1\r\n{}{}", bulk("maxmemory-policy"), bulk(words)),
            Form::Nested => format!("*3\r\n:1\r\n:0\r\n-{words}\r\n"),
            Form::Reply => format!("*3\r\n:1\r\n:0\r\n{}", bulk(words)),
            Form::Wake => {
                let wake = format!("1 99999999999999 ---------1 {words}");
                format!(">3\r\n+message\r\n{}{}", bulk(channel), bulk(&wake))
            }
            Form::Push => format!(">2\r\n{}{}", bulk(words), bulk(words)),
            Form::Address => format!("*2\r\n{}{}", bulk(words), bulk("1")),
            Form::Http => format!("HTTP/1.1 400 Bad Request\r\n\r\n{words}"),
            Form::Noise => format!("{words}\r\n"),
        }
        .into()
    }

    fn login(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.login.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Quote {
    fn of(self, argument: &str) -> String {
        let bytes = argument.bytes();
        match self {
            Self::None => argument.to_owned(),
            Self::Single => format!("'{argument}'"),
            Self::Backtick => format!("`{argument}`,"),
            Self::Double => format!("{argument:?}"),
            Self::Upper => argument.to_uppercase(),
            Self::Percent => bytes.map(|byte| format!("%{byte:02X}")).collect(),
            Self::Hex => bytes.map(|byte| format!("{byte:02x}")).collect(),
        }
    }
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}
