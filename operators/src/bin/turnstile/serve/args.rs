//! The arguments of `turnstile serve`: which values each may have.

use std::{net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::Args as Group;
use tower_turnstile::Limit;

use crate::{code, commands::CommandError, text::parse_duration};

/// Bytes of a token: short ones can be guessed.
const TOKEN: std::ops::RangeInclusive<usize> = 16..=512;

#[derive(Debug, Group)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub source: LimitSource,
    /// Share the slots of each --limit fairly among tenants. All users of the limits should do the same.
    #[arg(long, conflicts_with = "config")]
    pub fair: bool,
    /// Take values for --limit that other holders do not share: the largest applies to all.
    #[arg(long, conflicts_with = "config")]
    pub force: bool,
    /// Address for clients, or `unix:` and the path of a socket. Other machines need --token.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:3100")]
    pub listen: Address,
    /// Token that clients send as `Authorization: Bearer <token>`, 16 to 512 bytes. Everybody on the machine can see an
    /// argument: prefer the environment.
    #[arg(long, env = "TURNSTILE_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// Loopback address of the page for operators and its API, which are read-only here.
    #[arg(long, value_name = "ADDRESS")]
    pub page: Option<SocketAddr>,
    /// Longest time that a client may hold a slot, 1s to 30d. Default: no bound.
    #[arg(long, value_name = "TIME", value_parser = |text: &str| between(text, 1_000, 30 * 86_400_000))]
    pub max_hold: Option<Duration>,
    /// Time for a client to close its connection before its slot is released: after SIGTERM, and if the slot was revoked
    /// or held for too long. Up to one day.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = |text: &str| between(text, 0, 86_400_000))]
    pub grace: Duration,
    /// Interval at which a client hears from the server, 100ms to 60s.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = |text: &str| between(text, 100, 60_000))]
    pub heartbeat: Duration,
    /// Clients that hold a slot or wait at the same time, if `ulimit -n` allows. More are refused.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_clients: u32,
}

/// Where the limits are declared.
#[derive(Debug, Group)]
#[group(required = true, multiple = false)]
pub(crate) struct LimitSource {
    /// A limit and its slots, such as `gpu=8`, or without slots as its other holders have it; repeatable. Another value than
    /// theirs is refused: see --force.
    #[arg(long, value_name = "NAME[=SLOTS]")]
    pub limit: Vec<LimitArg>,
    /// Configuration file that declares the limits, as for services; SIGHUP reloads it. Its store, if any, takes precedence over
    /// --store.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// A limit of the command line.
#[derive(Clone, Debug)]
pub(crate) struct LimitArg {
    pub name: String,
    /// `None`: the value in force.
    pub slots: Option<u32>,
}

/// Where clients connect.
#[derive(Clone, Debug)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl ServeArgs {
    /// Whoever reaches the address can take any slot, unless there is a token.
    pub(super) fn check(&self) -> Result<(), CommandError> {
        let wrong = |message: String| Err(CommandError::new(code::WRONG_CALL, message));
        match (&self.token, &self.listen) {
            (Some(token), _) if !TOKEN.contains(&token.len()) || !is_sendable(token) => wrong(
                "a token has 16 to 512 bytes of visible ASCII, or spaces between them".to_owned(),
            ),
            (None, Address::Tcp(address)) if !address.ip().is_loopback() => wrong(format!(
                "clients of other machines reach {address}, and need a token: set TURNSTILE_TOKEN"
            )),
            _ => match self.page {
                Some(page) if !page.ip().is_loopback() => wrong(format!(
                    "other machines reach {page}, and the page has no token: write a loopback address"
                )),
                _ => Ok(()),
            },
        }
    }
}

impl FromStr for LimitArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, slots) = match text.rsplit_once('=') {
            Some((name, slots)) => (name, Some(slots)),
            None => (text, None),
        };
        let slots = slots.map(|slots| {
            let slots = slots.parse().map_err(|_| "slots are a number: gpu=8")?;
            // It checks both.
            let limit = Limit::try_concurrent(name.to_owned(), slots);
            limit.map_err(|error| error.to_string())?;
            Ok::<_, String>(slots)
        });
        Ok(Self {
            name: name.to_owned(),
            slots: slots.transpose()?,
        })
    }
}

impl FromStr for Address {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("unix:") {
            Some("") => Err("the path of the socket is missing"),
            Some(path) => Ok(Self::Unix(path.into())),
            None => {
                let address = text.parse().map(Self::Tcp);
                address.map_err(|_| "write an IP address and a port, or unix: and a path")
            }
        }
    }
}

/// Whether a client can send it in a header field.
fn is_sendable(token: &str) -> bool {
    token.trim() == token && !token.contains(|c: char| !matches!(c, ' '..='~'))
}

fn between(text: &str, from_ms: u64, to_ms: u64) -> Result<Duration, String> {
    let (from, to) = (Duration::from_millis(from_ms), Duration::from_millis(to_ms));
    match parse_duration(text) {
        Ok(time) if (from..=to).contains(&time) => Ok(time),
        Ok(_) => {
            let [from, to] = [from, to].map(humantime::format_duration);
            Err(format!("it must be {from} to {to}"))
        }
        Err(error) => Err(error.to_string()),
    }
}
