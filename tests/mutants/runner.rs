//! Applies mutants to a copy of the project, one after another, and runs the tests that must catch them.
//!
//! The copy and its build are kept in the folder named by the variable `MUTANTS_DIR`, or in `target/mutants`.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    signal,
    time::{Instant, timeout_at},
};

use crate::{
    harness::{Binary, Package},
    select::{git, select},
    table::Mutant,
};

/// Time limit for tests of the unchanged source.
const UNBROKEN_LIMIT: Duration = Duration::from_secs(600);
/// A mutant counts as hanging, and so as caught, if its tests take this many times as long as those of all selected
/// mutants without it.
const HANGS_AFTER: u32 = 2;
/// Minimum time limit.
const MIN_LIMIT: Duration = Duration::from_secs(90);
/// How long other tests may still fail after the first failure.
const GRACE: Duration = Duration::from_secs(1);

/// A test binary, its package, and the compiler flags for its build.
type Suite<'a> = (Option<&'a str>, &'a Package, &'a Binary);

/// Runs the [selected](select) mutants.
///
/// # Panics
///
/// If a mutant survives or cannot be run, or if its tests fail without it.
pub(crate) async fn run(root: &Path, all: Vec<Mutant>) {
    let mutants = select(root, all);
    let runner = Runner::new(root);
    let caught = tokio::select! {
        caught = runner.run(&mutants) => caught,
        // Unwinding drops the current process group.
        _ = signal::ctrl_c() => panic!("interrupted"),
    };
    println!("{caught} of {} caught", mutants.len());
    assert!(caught == mutants.len(), "not all were caught");
}

struct Runner {
    tree: PathBuf,
    build: PathBuf,
    /// Contains the temporary files that killed tests leave behind.
    temporary: TempDir,
    log: PathBuf,
}

/// Result of a test run.
#[derive(Default)]
struct Outcome {
    passed: Vec<String>,
    failed: Vec<String>,
    /// How the run ended, unless it succeeded.
    end: Option<&'static str>,
}

impl Runner {
    /// Copies the project.
    fn new(root: &Path) -> Self {
        let folder = env::var_os("MUTANTS_DIR").unwrap_or("target/mutants".into());
        let folder = root.join(folder);
        let runner = Self {
            tree: folder.join("tree"),
            build: folder.join("target"),
            temporary: tempfile::tempdir().expect("a temporary folder"),
            log: folder.join("log"),
        };
        // New files have new modification times, so cargo rebuilds everything left by a mutant of the last run.
        let _ = fs::remove_dir_all(&runner.tree);
        let others = ["--cached", "--others", "--exclude-standard"];
        let files = git(root, &[&["ls-files", "-z"], &others[..]].concat()).expect("a repository");
        for file in files.split_terminator('\0') {
            let (from, to) = (root.join(file), runner.tree.join(file));
            if from.is_file() {
                fs::create_dir_all(to.parent().expect("a folder")).expect("a folder is made");
                fs::copy(from, to).expect("a file is copied");
            }
        }
        runner
    }

    /// Prints a line for each mutant, and returns how many were caught.
    async fn run(&self, mutants: &[Mutant]) -> usize {
        let mut suites: BTreeMap<Suite<'_>, Vec<&str>> = BTreeMap::new();
        for mutant in mutants {
            let filters = suites.entry(self.suite_of(mutant)).or_default();
            filters.extend(filters_of(mutant));
        }
        let mut limits = BTreeMap::new();
        for (suite, filters) in suites {
            let taken = self.check_unbroken(suite, &filters).await;
            limits.insert(suite, MIN_LIMIT.max(HANGS_AFTER * taken));
        }
        println!("{:<40} {:<8} {:>4}  caught by", "mutant", "breaks", "s");
        let mut caught = 0;
        for mutant in mutants {
            let begin = Instant::now();
            let limit = limits[&self.suite_of(mutant)];
            let verdict = self.try_one(mutant, limit).await;
            caught += usize::from(verdict.is_ok());
            let verdict = verdict.unwrap_or_else(|fault| format!("!! {fault}"));
            let breaks: Vec<_> = mutant.breaks.iter().map(|one| format!("{one:?}")).collect();
            println!(
                "{:<40} {:<8} {:>4}  {verdict}",
                mutant.name,
                breaks.join(", "),
                begin.elapsed().as_secs(),
            );
        }
        caught
    }

    /// Checks that the tests pass on the unchanged source. Returns the time they took.
    async fn check_unbroken(&self, suite: Suite<'_>, filters: &[&str]) -> Duration {
        let name = suite.2.arguments().join(" ");
        if let Err(fault) = self.build(suite).await {
            panic!("unbroken, {name} {fault}");
        }
        let begin = Instant::now();
        let Outcome {
            passed,
            failed,
            end,
        } = self.test(suite, filters, UNBROKEN_LIMIT).await;
        let taken = begin.elapsed();
        let is_sound = failed.is_empty() && end.is_none();
        assert!(is_sound, "unbroken, {name}: {failed:?}, {end:?}");
        for filter in filters {
            let is_there = passed.iter().any(|test| test.contains(filter));
            assert!(is_there, "{name} has no test {filter}");
        }
        println!(
            "unbroken, {name}: {} tests pass, {:.1?}",
            passed.len(),
            taken
        );
        taken
    }

    /// Returns the tests that caught it, or why it survived.
    async fn try_one(&self, mutant: &Mutant, limit: Duration) -> Result<String, String> {
        let unbroken = self.replace(mutant.apply(&self.tree)?);
        let verdict = self.judge(mutant, limit).await;
        self.replace(unbroken);
        verdict
    }

    async fn judge(&self, mutant: &Mutant, limit: Duration) -> Result<String, String> {
        let suite = self.suite_of(mutant);
        self.build(suite).await?;
        let outcome = self.test(suite, &filters_of(mutant), limit).await;
        match (&outcome.failed[..], outcome.end) {
            ([], Some(end)) => Ok(format!("({end})")),
            ([], None) if outcome.passed.is_empty() => Err("its tests are gone".to_owned()),
            ([], None) => Err("SURVIVES".to_owned()),
            ([one], _) => Ok(one.clone()),
            ([one, others @ ..], _) => Ok(format!("{one} and {} more", others.len())),
        }
    }

    /// Writes these files, and returns their previous contents.
    fn replace(&self, files: BTreeMap<String, String>) -> BTreeMap<String, String> {
        let replace = |(file, source)| {
            let path = self.tree.join(&file);
            let before = fs::read_to_string(&path).expect("a file is read");
            fs::write(path, source).expect("a file is written");
            (file, before)
        };
        files.into_iter().map(replace).collect()
    }

    /// If the compiler itself has failed, as its incremental builds sometimes do, builds again without the results of
    /// earlier builds.
    async fn build(&self, suite: Suite<'_>) -> Result<(), String> {
        let result = self.build_once(suite).await;
        if result.is_err()
            && self
                .read_log()
                .contains("the compiler unexpectedly panicked")
        {
            let _ = fs::remove_dir_all(self.build.join("debug/incremental"));
            return self.build_once(suite).await;
        }
        result
    }

    async fn build_once(&self, suite: Suite<'_>) -> Result<(), String> {
        let mut command = self.cargo(suite);
        let mut group = Group::start(command.arg("--no-run").stdout(Stdio::null()));
        if group.process.wait().await.expect("cargo ends").success() {
            return Ok(());
        }
        let log = self.read_log();
        let error = log.lines().find(|line| line.starts_with("error"));
        Err(format!("does not build: {}", error.unwrap_or_default()))
    }

    fn read_log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    async fn test(&self, suite: Suite<'_>, filters: &[&str], limit: Duration) -> Outcome {
        let mut command = self.cargo(suite);
        command
            .arg("--")
            .args(filters)
            .env("TMPDIR", self.temporary.path());
        let mut group = Group::start(command.stdout(Stdio::piped()));
        let lines = group.process.stdout.take().expect("a pipe");
        let mut lines = BufReader::new(lines).split(b'\n');
        let mut outcome = Outcome::default();
        let mut until = Instant::now() + limit;
        loop {
            let Ok(line) = timeout_at(until, lines.next_segment()).await else {
                outcome.end = Some("hangs");
                return outcome;
            };
            let Some(line) = line.expect("a pipe is read") else {
                break;
            };
            match read(&String::from_utf8_lossy(&line)) {
                Some((test, "ok")) => outcome.passed.push(test.to_owned()),
                Some((test, "FAILED")) => {
                    outcome.failed.push(test.to_owned());
                    until = until.min(Instant::now() + GRACE);
                }
                _ => {}
            }
        }
        let status = group.process.wait().await.expect("cargo ends");
        outcome.end = (!status.success()).then_some("crashes");
        outcome
    }

    fn cargo(&self, (flags, package, binary): Suite<'_>) -> Command {
        let mut command = Command::new(env!("CARGO"));
        command
            .args(["test", "--locked", "--all-features", "--package"])
            .arg(package.name)
            .args(binary.arguments())
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.build)
            .env("CARGO_TERM_COLOR", "never")
            // A one-line change compiles in a third of the time.
            .env("CARGO_INCREMENTAL", "1")
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .stdin(Stdio::null())
            .stderr(File::create(&self.log).expect("a log"));
        if let Some(flags) = flags {
            command.env("RUSTFLAGS", flags);
        }
        command
    }

    fn suite_of<'a>(&self, mutant: &'a Mutant) -> Suite<'a> {
        let package = mutant.package(&self.tree);
        let package = package.unwrap_or_else(|fault| panic!("{}: {fault}", mutant.name));
        let flags = mutant.rustflags.as_deref();
        (flags, package, &mutant.caught_by.binary)
    }
}

fn filters_of(mutant: &Mutant) -> Vec<&str> {
    let filters = mutant.caught_by.filters.iter();
    filters.map(String::as_str).collect()
}

/// A test and its result, if the harness's line contains one.
fn read(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("test ")?.split_once(" ... ")
}

/// A process and all its descendants. Killed when dropped.
struct Group {
    process: tokio::process::Child,
    id: Pid,
}

impl Group {
    fn start(command: &mut Command) -> Self {
        let process = command.process_group(0).spawn().expect("cargo runs");
        let id = process.id().expect("it was not waited for");
        let id = Pid::from_raw(id.try_into().expect("an id"));
        Self { process, id }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Fails if all of them have ended.
        let _ = killpg(self.id, Signal::SIGKILL);
    }
}
