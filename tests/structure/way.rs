//! The path of a permit, as described in ARCHITECTURE.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Files on the path of a permit, and calls between their functions. The numbers may only decrease.
const MOST_FILES: usize = 16;
const MOST_CALLS: usize = 63;

/// The path of a permit, from `acquire()` to Redis and back: the steps of ARCHITECTURE.md, each with its functions. A
/// function is called by the nearest function above it with less indentation. A function without indentation is not
/// called by the step before: in between are the outbox, the wake-up of the driver, the connection, or the request's
/// waker.
const WAY: [(&str, &str); 8] = [
    (
        "1",
        "semaphore.rs Acquire::poll
           keeper/request.rs PermitRequest::poll
             keeper/request.rs PermitRequest::ask",
    ),
    (
        "2",
        "keeper/lock.rs Keeper::with_driver
           keeper/lock.rs DriverState::nudge
             keeper/lock.rs DriverState::wake
           keeper/lock.rs Keeper::after_step",
    ),
    (
        "3",
        "keeper/core/permits.rs Core::submit
           keeper/core/acquire.rs Core::submit_legs
             keeper/core/acquire.rs Core::enter_leg
               keeper/core/queues.rs Queues::find_or_make
               keeper/queue/permit.rs Queue::enter
             keeper/core/acquire.rs Core::ask_store
               keeper/core/queues.rs Queues::change
                 keeper/core/queues.rs Queues::list
               keeper/queue/permit.rs Queue::ask_store",
    ),
    (
        "4",
        "keeper/driver.rs drive
           keeper/lock.rs DriverState::next_step
             keeper/core/exchange.rs Core::next_exchange
               keeper/core/draft.rs Draft::fill_and_send
                 keeper/core/draft.rs Draft::fill
                   keeper/core/draft.rs Draft::fill_with_all
                     keeper/core/draft.rs Draft::take_batches
                       keeper/core/draft.rs Batches::add
                         keeper/queue/exchange.rs Queue::take_batch
                           keeper/queue/exchange.rs Queue::fill_batch
                             keeper/queue/exchange.rs Queue::take_newcomers
                               keeper/queue/permit.rs Queue::send_listed
                 keeper/core/draft.rs Draft::send",
    ),
    (
        "5",
        "keeper/driver.rs InFlight::send
           store/redis/session.rs RedisSession::exchange
             store/redis/session.rs Exchanger::exchange
               store/redis/session.rs Exchanger::link
               store/redis/session.rs Exchanger::run
                 store/redis/session.rs Exchanger::encode
                   store/redis/codec.rs encode
               store/redis/session.rs Exchanger::read
                 store/redis/codec.rs decode
         keeper/driver.rs InFlight::next
           keeper/driver.rs InFlight::poll
             keeper/driver.rs Lane::poll
               keeper/driver.rs Lane::outcome",
    ),
    (
        "6",
        "keeper/core/exchange.rs Core::on_reply
           keeper/core/exchange.rs Core::answered
             keeper/queue/exchange.rs Queue::on_answer
               keeper/queue/exchange.rs Queue::acquired
                 keeper/queue/exchange.rs Queue::held_until
                   keeper/queue/permit.rs Queue::hold
                     keeper/queue/permit.rs Queue::set
           keeper/core/acquire.rs Core::follow_decisions
             keeper/core/acquire.rs Core::follow_all
               keeper/core/acquire.rs Core::follow
                 keeper/core/acquire.rs Core::advance
                   keeper/core/acquire.rs Core::grant
                     keeper/effects.rs Effects::push",
    ),
    (
        "7",
        "keeper/lock.rs Keeper::with_driver
           keeper/lock.rs Keeper::after_step
             keeper/effects.rs Effects::run
               keeper/effects.rs Effects::run_all
                 keeper/effects.rs Effect::run",
    ),
    (
        "8",
        "keeper/request.rs PermitRequest::poll
           keeper/request.rs PermitRequest::collect
             keeper/core/permits.rs Core::collect
               keeper/core/permits.rs Core::collect_request
                 keeper/core/permits.rs Core::take
                   keeper/queue/permit.rs Queue::take
                     keeper/queue/entries/entry.rs Entry::hand_over
         semaphore.rs Acquire::poll
           permit.rs Permit::new",
    ),
];

/// Calls from one step to the next.
const BETWEEN: [[&str; 2]; 5] = [
    [
        "keeper/request.rs PermitRequest::ask",
        "keeper/handle.rs KeeperHandle::try_act",
    ],
    [
        "keeper/request.rs PermitRequest::ask",
        "keeper/core/permits.rs Core::submit",
    ],
    ["keeper/driver.rs drive", "keeper/driver.rs InFlight::send"],
    [
        "keeper/driver.rs drive",
        "keeper/core/exchange.rs Core::on_reply",
    ],
    [
        "keeper/driver.rs drive",
        "keeper/lock.rs Keeper::with_driver",
    ],
];

/// A step's functions, each with its caller.
fn functions_of(step: &'static str) -> Vec<(Option<&'static str>, &'static str)> {
    let mut callers: Vec<(usize, &str)> = Vec::new();
    let mut functions = Vec::new();
    for (number, line) in step.lines().enumerate() {
        // The first line follows a quotation mark.
        let left = match number {
            0 => 9,
            _ => line.len() - line.trim_start().len(),
        };
        while callers.last().is_some_and(|(other, _)| *other >= left) {
            callers.pop();
        }
        let function = line.trim();
        functions.push((callers.last().map(|(_, caller)| *caller), function));
        callers.push((left, function));
    }
    functions
}

/// The calls of each function in a file, by its name: `Type::method`, or `function`. A call is a name, with the type if
/// it precedes the name.
#[derive(Default)]
struct Calls(BTreeMap<String, BTreeSet<(Option<String>, String)>>);

impl Calls {
    fn of(file: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../src")
            .join(file);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let mut calls = Self::default();
        calls.read(text.parse().unwrap(), "");
        calls
    }

    /// Finds functions, here and in `impl` blocks.
    fn read(&mut self, tokens: TokenStream, of_type: &str) {
        let (mut header, mut function, mut is_impl) = (Vec::new(), None, false);
        let mut after_fn = false;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if after_fn => {
                    function = Some(format!("{of_type}{ident}"));
                    after_fn = false;
                }
                TokenTree::Ident(ident) if ident == "fn" => after_fn = true,
                TokenTree::Ident(ident) if ident == "impl" && function.is_none() => {
                    (is_impl, header) = (true, Vec::new());
                }
                TokenTree::Ident(ident) => header.push(ident.to_string()),
                TokenTree::Punct(punct) if punct.as_char() == ';' => function = None,
                TokenTree::Punct(punct) => header.push(punct.to_string()),
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                    if let Some(function) = function.take() {
                        let found = self.0.entry(function).or_default();
                        find_calls(group.stream(), found);
                    } else if is_impl {
                        self.read(group.stream(), &format!("{}::", implementor(&header)));
                    }
                    is_impl = false;
                }
                _ => {}
            }
        }
    }

    fn has(&self, caller: &str, callee: &str) -> bool {
        let (of_type, name) = match callee.split_once("::") {
            Some((of_type, name)) => (Some(of_type), name),
            None => (None, callee),
        };
        let calls = self.0.get(caller).into_iter().flatten();
        let is_type = |other: &String| other.starts_with(char::is_uppercase) && other != "Self";
        let mut calls = calls.filter(|(_, called)| called == name);
        calls.any(|(other, _)| match other {
            Some(other) if is_type(other) => Some(&**other) == of_type,
            // A method call does not show the type.
            _ => true,
        })
    }
}

/// The type of an `impl` block, without its arguments.
fn implementor(header: &[String]) -> &str {
    let mut depth = 0;
    let mut last = "";
    for word in header {
        match &**word {
            "<" => depth += 1,
            ">" => depth -= 1,
            "where" => break,
            word if depth == 0 && word.starts_with(char::is_alphabetic) => last = word,
            _ => {}
        }
    }
    last
}

/// Names before an argument list, and paths passed as arguments.
fn find_calls(tokens: TokenStream, found: &mut BTreeSet<(Option<String>, String)>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let ident = |at: usize| match tokens.get(at) {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    };
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => find_calls(group.stream(), found),
            TokenTree::Ident(name) => {
                let is = |at: usize, c: char| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == c);
                let is_path = at >= 3 && is(at - 1, ':') && is(at - 2, ':');
                let is_called = matches!(tokens.get(at + 1), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
                if is_path || is_called {
                    let before = if is_path { ident(at - 3) } else { None };
                    found.insert((before, name.to_string()));
                }
            }
            _ => {}
        }
    }
}

/// Each function on the way calls the next one, and the table of ARCHITECTURE.md lists their files.
#[test]
fn a_permit_goes_its_way() {
    let mut read: BTreeMap<&str, Calls> = BTreeMap::new();
    let mut files = BTreeSet::new();
    let mut calls: BTreeSet<(&str, &str)> = BETWEEN.iter().map(|[from, to]| (*from, *to)).collect();
    let mut functions = BTreeSet::new();
    let architecture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ARCHITECTURE.md");
    let architecture = fs::read_to_string(architecture).unwrap();
    for (step, lines) in WAY {
        let mut of_step = BTreeSet::new();
        for (caller, function) in functions_of(lines) {
            let (file, name) = function.split_once(' ').unwrap();
            let known = read.entry(file).or_insert_with(|| Calls::of(file));
            assert!(known.0.contains_key(name), "`{file}` has no `{name}`");
            calls.extend(caller.map(|caller| (caller, function)));
            functions.insert(function);
            of_step.insert(file);
        }
        let mut rows = architecture.lines();
        let row = rows.find(|row| row.starts_with(&format!("| {step}. ")));
        let row = row.unwrap_or_else(|| panic!("ARCHITECTURE.md has no step {step}"));
        let named = row.split('`').filter(|word| word.ends_with(".rs"));
        let named: BTreeSet<&str> = named.collect();
        assert_eq!(named, of_step, "files of step {step} in ARCHITECTURE.md");
        files.append(&mut of_step);
    }
    for (caller, function) in &calls {
        let (file, name) = caller.split_once(' ').unwrap();
        let (_, called) = function.split_once(' ').unwrap();
        assert!(functions.contains(caller), "`{caller}` is not on the way");
        assert!(
            read[file].has(name, called),
            "`{caller}` does not call `{called}`"
        );
    }
    let within = |folder: &str| files.iter().filter(|file| file.starts_with(folder)).count();
    println!(
        "the path of a permit: files {} (keeper {}, store {}), functions {}, calls {}",
        files.len(),
        within("keeper/"),
        within("store/"),
        functions.len(),
        calls.len()
    );
    assert!(
        files.len() <= MOST_FILES && calls.len() <= MOST_CALLS,
        "the way has grown"
    );
}
