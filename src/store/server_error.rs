//! The meaning of an error of a Redis server, in words of our own.
//!
//! A server may quote its input, which includes a user's name and a password. An unknown command is repeated with its
//! arguments, and a proxy may repeat anything, at any later time, in any form. So no word of a server is passed on: its
//! error is recognized and replaced by our own text. All possible texts are in this file.

use super::{
    StoreError,
    StoreErrorKind::{self, Credentials, Misconfigured, Outage, Permission},
};

const IN_A_CLUSTER: &str =
    "the server is a node of a cluster: the URL of one begins with `redis+cluster://`";

/// Errors without a code of their own: a phrase in them, and after the colon what it means. None counts as an outage,
/// because that could open the gate: the server may be repeating our own words.
const PHRASES: [&str; 4] = [
    "DB index is out of range: the server does not have the database in the URL",
    "SELECT is not allowed in cluster mode: a cluster has no databases",
    "cluster support disabled: the server is not a node of a cluster",
    "called from script: a command is not known or not allowed there, so it is older than Redis 6.2",
];
const MAX_CLIENTS: &str = "ERR max number of clients";
/// How Redis refuses a script's commands for lack of permission, without a code.
const FORBIDDEN_IN_SCRIPT: [&str; 2] = ["ACL failure in script", "user executing the script"];
const UNKNOWN_COMMAND: &str = "unknown command";
/// How a script learns that the hash slot of its key is moving to another node, without a code: a command of the script has
/// removed the key here, and the next one is redirected, which scripts cannot be.
const MOVING_IN_SCRIPT: [&str; 4] = [
    "Script attempted to access a non local key",
    "Script attempted to access a slot not served",
    "Lua script attempted to access a non local key",
    "Lua script attempted to access a slot not served",
];
/// The code of the same fault outside scripts.
const MOVING: &str = "TRYAGAIN";
const UNKNOWN: &str = "ERR: an error that is not known here, whose words are left out because they may quote \
                       a password: the server's log or `redis-cli` may tell more";

/// Names that a server may refuse or not know, as documented for Redis and its ACLs.
const COMMANDS: &str = "asking auth client client|setinfo config config|get eval evalsha get hdel hello hgetall \
                        hscan hset info llen lpush lrange ltrim pexpire pttl publish pubsub pubsub|numsub scan \
                        select sentinel sentinel|get-master-addr-by-name set subscribe time zadd zcard zcount \
                        zlexcount zmscore zrange zrank zrem zremrangebyrank zremrangebyscore zscore";

impl StoreError {
    /// Classifies an error by a Redis server's words. An unknown error never counts as an outage, because that would
    /// open the gate.
    ///
    /// Idempotent: the message parses as the same error.
    pub(crate) fn of_server(words: &str) -> Self {
        let (kind, message) = read(words);
        Self { kind, message }
    }

    /// Whether the server does not know the command, or forbids it, its key or its channel.
    pub fn lacks_command(&self) -> bool {
        let is_unknown = || self.message.contains(UNKNOWN_COMMAND);
        self.kind == Permission || is_unknown()
    }
}

fn read(words: &str) -> (StoreErrorKind, String) {
    let has = |part: &&str| words.contains(*part);
    if FORBIDDEN_IN_SCRIPT.iter().any(has) || code(words) == Some("NOPERM") {
        return (Permission, format!("NOPERM: {}", forbidden(words)));
    }
    if let Some((code, (kind, meaning))) = known_code(words) {
        return (kind, format!("{code}: {meaning}"));
    }
    if words.starts_with(MAX_CLIENTS) {
        return (
            Outage,
            format!("{MAX_CLIENTS} reached: see its `maxclients`"),
        );
    }
    if has(&UNKNOWN_COMMAND) {
        // The command's arguments follow, quoted too.
        let command = quoted(words).next().and_then(known_command);
        let command = command.map_or_else(String::new, |command| format!(" `{command}`"));
        return (Misconfigured, format!("ERR {UNKNOWN_COMMAND}{command}"));
    }
    if is_moving(words)
        && let Some((kind, meaning)) = meaning_of(MOVING)
    {
        return (kind, format!("{MOVING}: {meaning}"));
    }
    let phrase = (PHRASES.iter()).find(|text| text.split(':').next().as_ref().is_some_and(has));
    let message = phrase.map_or(UNKNOWN.to_owned(), |text| format!("ERR {text}"));
    (Misconfigured, message)
}

/// The permissions that the store's user lacks.
fn forbidden(words: &str) -> String {
    // The user's name may precede the command. A key or a channel may be quoted too.
    let is_of_command = words.contains(" command");
    let command = quoted(words).filter_map(known_command).last();
    if let Some(command) = command.filter(|_| is_of_command) {
        return format!("the user may not run the command `{command}`");
    }
    let what = match (words.contains("channel"), words.contains("key")) {
        (true, _) => "a channel",
        (false, true) => "a key",
        (false, false) => "a command",
    };
    format!("the user has no permission for {what} that is needed")
}

fn is_moving(words: &str) -> bool {
    let begins = |part: &str| MOVING_IN_SCRIPT.iter().any(|words| part.starts_with(words));
    begins(words.trim_start_matches("ERR ")) || in_script(words).any(begins)
}

/// An error that is recognized by its code, the first word: its kind, and our text after the code.
fn meaning_of(code: &str) -> Option<(StoreErrorKind, &'static str)> {
    let meaning = match code {
        "ASK" | "MOVED" => IN_A_CLUSTER,
        "BUSY" => "the server is busy with a script",
        "CLUSTERDOWN" => "the cluster is down, or no node has a hash slot",
        "CROSSSLOT" => "keys of one call are in different hash slots",
        "DENIED" => "the server is in protected mode: give its user a password",
        "LOADING" => "the server is loading its data",
        "MASTERDOWN" => "the server is a replica whose primary is down",
        "MISCONF" => "the server cannot save its data and takes no writes",
        "NOAUTH" => "the server asks for a password",
        "NOPROTO" => "the server does not speak RESP3: it must be Redis 6.2 or later",
        "NOREPLICAS" => "the server has fewer replicas than its `min-replicas-to-write`",
        "OOM" => "the server has reached its `maxmemory`",
        "READONLY" => "the server is a replica and takes no writes",
        "TRYAGAIN" => "keys of one call are moving to another node",
        "WRONGPASS" => "the user is not known or disabled, or the password is wrong",
        "WRONGTYPE" => "the key holds something else",
        _ => return None,
    };
    let kind = match code {
        "BUSY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "MISCONF" => Outage,
        "NOREPLICAS" | "OOM" | "READONLY" | "TRYAGAIN" => Outage,
        "NOAUTH" | "WRONGPASS" => Credentials,
        _ => Misconfigured,
    };
    Some((kind, meaning))
}

fn known_code(words: &str) -> Option<(&str, (StoreErrorKind, &'static str))> {
    let known = |code| Some((code, meaning_of(code)?));
    let in_script = in_script(words).filter_map(code);
    code(words).into_iter().chain(in_script).find_map(known)
}

/// An error of a command in a script begins with its code, or in Redis 6 with the places it passed through.
fn in_script(words: &str) -> impl Iterator<Item = &str> {
    let is_place = |c: char| c.is_ascii_digit() || matches!(c, ' ' | ':' | '-');
    let parts = words.split("user_script:").skip(1);
    parts.map(move |part| part.trim_start_matches(is_place))
}

/// The first word.
fn code(words: &str) -> Option<&str> {
    words.split([' ', ':']).next()
}

/// Quoted parts and the text between them.
fn quoted(words: &str) -> impl Iterator<Item = &str> {
    words.split(['\'', '`', '"']).skip(1)
}

fn known_command(name: &str) -> Option<&'static str> {
    let mut known = COMMANDS.split(' ');
    known.find(|known| known.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::{prelude::*, sample::select};

    use super::*;

    const CODES: [&str; 17] = [
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "CROSSSLOT",
        "DENIED",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOPROTO",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
        "WRONGPASS",
        "WRONGTYPE",
    ];

    #[test]
    fn the_words_of_a_server_are_understood() {
        let cases = [
            ("LOADING Redis is loading the dataset in memory", Outage),
            ("BUSY Redis is busy running a script", Outage),
            (
                "READONLY You can't write against a read only replica.",
                Outage,
            ),
            ("MASTERDOWN Link with MASTER is down", Outage),
            ("CLUSTERDOWN Hash slot not served", Outage),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                Outage,
            ),
            ("NOREPLICAS Not enough good replicas to write.", Outage),
            ("MISCONF Redis is configured to save RDB snapshots", Outage),
            ("ERR max number of clients reached", Outage),
            (
                "@user_script: 5: @user_script: 5: -OOM command not allowed",
                Outage,
            ),
            ("NOAUTH Authentication required.", Credentials),
            ("WRONGPASS invalid username-password pair", Credentials),
            ("NOPERM this user has no permissions", Permission),
            (
                "ERR ACL failure in script: User OOM has no permissions to run the 'time' command",
                Permission,
            ),
            (
                "ERR The user executing the script can't run this command",
                Permission,
            ),
            ("WRONGTYPE Operation against a key", Misconfigured),
            (
                "CROSSSLOT Keys in request don't hash to the same slot",
                Misconfigured,
            ),
            ("MOVED 1234 10.0.0.1:6379", Misconfigured),
            ("DENIED Redis is running in protected mode", Misconfigured),
            ("ERR unknown command 'EVALSHA'", Misconfigured),
            // Redis 7 and 6, Valkey.
            (
                "ERR Script attempted to access a non local key in a cluster node script: f, on @user_script:9.",
                Outage,
            ),
            (
                "@user_script: 9: Lua script attempted to access a non local key in a cluster node",
                Outage,
            ),
            (
                "ERR Script attempted to access a slot not served by this node",
                Outage,
            ),
        ];
        for (words, kind) in cases {
            assert_eq!(StoreError::of_server(words).kind, kind, "{words}");
        }
    }

    #[test]
    fn the_message_has_what_an_operator_needs() {
        for (words, kind, text) in [
            (
                "NOAUTH Authentication required.",
                Credentials,
                "NOAUTH: the server asks for a password",
            ),
            (
                "WRONGPASS invalid username-password pair or user is disabled.",
                Credentials,
                "WRONGPASS: the user is not known or disabled, or the password is wrong",
            ),
            // Redis 6, Redis 7, and within a script.
            (
                "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
                Permission,
                "NOPERM: the user may not run the command `evalsha`",
            ),
            (
                "NOPERM User me has no permissions to run the 'config|get' command",
                Permission,
                "NOPERM: the user may not run the command `config|get`",
            ),
            (
                "ERR ACL failure in script: User OOM has no permissions to run the 'time' command",
                Permission,
                "NOPERM: the user may not run the command `time`",
            ),
            (
                "@user_script: 8: The user executing the script can't run this command or subcommand",
                Permission,
                "NOPERM: the user has no permission for a command that is needed",
            ),
            (
                "NOPERM this user has no permissions to access one of the keys used as arguments",
                Permission,
                "NOPERM: the user has no permission for a key that is needed",
            ),
            (
                "NOPERM No permissions to access a channel",
                Permission,
                "NOPERM: the user has no permission for a channel that is needed",
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                Outage,
                "OOM: the server has reached its `maxmemory`",
            ),
            (
                "@user_script: 5: @user_script: 5: -OOM command not allowed",
                Outage,
                "OOM: the server has reached its `maxmemory`",
            ),
            (
                "ERR Error running script (call to f_1): @user_script:12: @user_script: 12: -MISCONF Redis is",
                Outage,
                "MISCONF: the server cannot save its data and takes no writes",
            ),
            (
                "READONLY You can't write against a read only replica.",
                Outage,
                "READONLY: the server is a replica and takes no writes",
            ),
            (
                "CLUSTERDOWN Hash slot not served",
                Outage,
                "CLUSTERDOWN: the cluster is down, or no node has a hash slot",
            ),
            (
                "ERR max number of clients reached",
                Outage,
                "ERR max number of clients reached: see its `maxclients`",
            ),
            (
                "ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'canary' ",
                Misconfigured,
                "ERR unknown command `hello`",
            ),
            (
                "ERR unknown command `EVALSHA`, with args beginning with: `a`, ",
                Misconfigured,
                "ERR unknown command `evalsha`",
            ),
            // An argument is not mistaken for the command.
            (
                "ERR unknown command 'CANARY', with args beginning with: 'GET' 'maxmemory-policy' ",
                Misconfigured,
                "ERR unknown command",
            ),
            (
                "ERR unknown command 'CONFIG', with args beginning with: 'GET' 'maxmemory-policy' ",
                Misconfigured,
                "ERR unknown command `config`",
            ),
            // The user's name is not mistaken for the command.
            (
                "NOPERM User 'get' has no permissions to run the 'evalsha' command",
                Permission,
                "NOPERM: the user may not run the command `evalsha`",
            ),
            (
                "ERR unknown command canary",
                Misconfigured,
                "ERR unknown command",
            ),
            (
                "MOVED 1234 10.0.0.1:6379",
                Misconfigured,
                "MOVED: the server is a node of a cluster: the URL of one begins with `redis+cluster://`",
            ),
            ("ERR AUTH canary failed", Misconfigured, UNKNOWN),
            ("CANARY canary", Misconfigured, UNKNOWN),
            ("", Misconfigured, UNKNOWN),
        ] {
            let error = StoreError::of_server(words);
            assert_eq!(
                (error.kind, error.message.as_str()),
                (kind, text),
                "{words}"
            );
        }
    }

    /// A password may look like a code.
    #[test]
    fn what_we_said_ourselves_opens_no_gate() {
        for word in CODES.into_iter().chain([MAX_CLIENTS]) {
            for words in [
                format!(
                    "ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' '{word}'"
                ),
                format!("ERR unknown command HELLO 3 AUTH {word}"),
                format!("ERR {word}"),
                format!("AUTH {word} failed"),
            ] {
                assert_eq!(StoreError::of_server(&words).kind, Misconfigured, "{words}");
            }
        }
    }

    /// Words of servers, and pieces of them with other text in between.
    fn words() -> impl Strategy<Value = String> {
        let codes = CODES.into_iter();
        let phrases = PHRASES.iter().filter_map(|text| text.split(':').next());
        let others = [
            "NOPERM",
            "ERR",
            "-",
            ":",
            " ",
            "'",
            "`",
            "key",
            "channel",
            "@user_script: 7: ",
            "1",
            MAX_CLIENTS,
            UNKNOWN_COMMAND,
            FORBIDDEN_IN_SCRIPT[0],
            MOVING_IN_SCRIPT[0],
            "ü",
            "canary",
        ];
        let known = codes
            .chain(phrases)
            .chain(COMMANDS.split(' '))
            .chain(others);
        let piece = prop_oneof![
            4 => select(known.collect::<Vec<_>>()).prop_map(str::to_owned),
            1 => any::<String>(),
        ];
        (
            proptest::collection::vec(piece, 0..8),
            select(vec![" ", "", "'"]),
        )
            .prop_map(|(pieces, between)| pieces.join(between))
    }

    /// All texts that an error can produce.
    fn all_messages() -> BTreeSet<String> {
        let codes = CODES.into_iter().map(|code| {
            let (_, meaning) = meaning_of(code).expect(code);
            format!("{code}: {meaning}")
        });
        let phrases = PHRASES.iter().map(|text| format!("ERR {text}"));
        let commands = COMMANDS.split(' ').flat_map(|command| {
            [
                format!("ERR unknown command `{command}`"),
                format!("NOPERM: the user may not run the command `{command}`"),
            ]
        });
        let lacks = ["a key", "a channel", "a command"];
        let lacks = lacks
            .map(|what| format!("NOPERM: the user has no permission for {what} that is needed"));
        let others = [
            "ERR max number of clients reached: see its `maxclients`",
            "ERR unknown command",
            UNKNOWN,
        ];
        let others = others.map(str::to_owned);
        let all = codes.chain(phrases).chain(commands);
        all.chain(lacks).chain(others).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn no_word_of_a_server_is_passed_on(words in words()) {
            let error = StoreError::of_server(&words);
            prop_assert!(all_messages().contains(&error.message), "{}", error.message);
            let second = StoreError::of_server(&error.message);
            prop_assert_eq!((second.kind, second.message), (error.kind, error.message));
        }
    }
}
