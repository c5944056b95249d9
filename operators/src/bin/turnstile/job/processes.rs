//! The processes that descend from this one, as Linux lists them.

use std::{collections::HashMap, fs};

use nix::unistd::{Pid, getpid};

/// A process that has not ended.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub pid: Pid,
    /// As the system shows it: up to 15 bytes.
    pub name: String,
    parent: Pid,
}

/// All processes that descend from this one, parents first, except these and what descends from them.
pub(super) fn descendants(except: &[Pid]) -> Vec<Process> {
    let mut children: HashMap<Pid, Vec<Process>> = HashMap::new();
    for process in all() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = children.remove(&getpid()).unwrap_or_default();
    found.retain(|process| !except.contains(&process.pid));
    let mut looked_at = 0;
    while let Some(process) = found.get(looked_at) {
        let more = children.remove(&process.pid).unwrap_or_default();
        found.extend(more);
        looked_at += 1;
    }
    found
}

/// A process may end at any time, and its files with it.
fn all() -> impl Iterator<Item = Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| {
        let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        parse(pid, &String::from_utf8_lossy(&stat))
    })
}

/// `None` for a process that has ended and was not reaped yet.
fn parse(pid: i32, stat: &str) -> Option<Process> {
    // The name may contain anything.
    let (name, rest) = stat.rsplit_once(") ")?;
    let (_, name) = name.split_once('(')?;
    let mut fields = rest.split(' ');
    let (state, parent) = (fields.next()?, fields.next()?.parse().ok()?);
    (!["Z", "X"].contains(&state)).then(|| Process {
        pid: Pid::from_raw(pid),
        name: name.to_owned(),
        parent: Pid::from_raw(parent),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        let process = parse(12, "12 (a) b ) ( (c)) S 7 12 7 0 -1").expect("a process");
        assert_eq!(
            (&*process.name, process.parent.as_raw()),
            ("a) b ) ( (c)", 7)
        );
        for none in [
            "",
            "12 (sh) Z 7 12",
            "12 (sh) X 7 12",
            "12 (sh) S",
            "12 sh S 7",
        ] {
            assert!(parse(12, none).is_none(), "{none}");
        }
    }
}
