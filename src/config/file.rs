//! Reads a file while another process may be writing it.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{task::spawn_blocking, time::sleep};

use super::error::{ConfigFileError, Fault};

/// Time between two reads of a file. An editor empties and rewrites a file in a fraction of this time.
const SETTLE: Duration = Duration::from_millis(100);
/// Maximum number of reads of a file that keeps changing.
const MAX_READS: usize = 20;
const MAX_BYTES: u64 = 1 << 20;

/// One read of a file, and when it was modified.
#[derive(PartialEq, Eq)]
struct FileRead {
    bytes: Vec<u8>,
    modified: Option<SystemTime>,
}

/// Returns the text of a file once two reads agree.
pub(super) async fn read_file(path: &Path) -> io::Result<String> {
    let path: Arc<Path> = path.into();
    let look = || {
        let path = path.clone();
        spawn_blocking(move || look_at(&path))
    };
    let mut last = look().await??;
    for _ in 1..MAX_READS {
        sleep(SETTLE).await;
        let next = look().await??;
        if next == last {
            return String::from_utf8(next.bytes).map_err(|_| invalid("is not UTF-8"));
        }
        last = next;
    }
    Err(invalid(
        "changes all the time, so what is read may not be all of it",
    ))
}

fn look_at(path: &Path) -> io::Result<FileRead> {
    // Opening a pipe could block for ever.
    if !fs::metadata(path)?.is_file() {
        return Err(invalid("is not a regular file, which could be read twice"));
    }
    let mut file = File::open(path)?;
    let mut bytes = Vec::new();
    (&mut file).take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(invalid("is larger than 1 MiB"));
    }
    let modified = file.metadata()?.modified().ok();
    Ok(FileRead { bytes, modified })
}

fn invalid(fault: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, fault)
}

/// Checks that the text ends with the line that it announces. The announcement comes first, so a truncated text does not
/// end with this line.
pub(super) fn check_last_line(text: &str, end: &str) -> Result<(), ConfigFileError> {
    // TOML skips a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let first = lines
        .iter()
        .find(|line| !line.is_empty() && !line.starts_with('#'));
    let last = lines.iter().rfind(|line| !line.is_empty());
    let fault = if !end.starts_with('#') || end.trim() != end || end.lines().count() != 1 {
        "is not the text of a comment, such as `# end`"
    } else if !first.is_some_and(|line| line.starts_with("last_line")) {
        "does not stand before everything else"
    } else if last != Some(&end) {
        "is not how the file ends: it may have been cut short"
    } else if lines.iter().filter(|line| line.starts_with(end)).count() > 1 {
        // A truncated line of this form could be the announced line.
        "is how another line begins too"
    } else {
        return Ok(());
    };
    Err(ConfigFileError::of("last_line", fault))
}

/// Checks that the last value is complete: 1000 may be truncated to 100. All values but numbers have an end mark.
pub(super) fn check_last_value(text: &str) -> Result<(), ConfigFileError> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let word = text.rsplit(|c| !is_word(c)).next().unwrap_or_default();
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        let fault = "ends in a number without a line break: it may have been cut short";
        let faults = vec![Fault::at(text, text.len(), fault.to_owned())];
        return Err(ConfigFileError { faults });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, io::Write};

    use tempfile::TempDir;

    use super::*;

    const HALF: Duration = Duration::from_millis(50);

    fn file(folder: &TempDir, text: &str) -> std::path::PathBuf {
        let path = folder.path().join("limits.toml");
        fs::write(&path, text).unwrap();
        path
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_left_alone_is_read_once_it_has_settled() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "whole");
        let began = tokio::time::Instant::now();
        assert_eq!(read_file(&path).await.unwrap(), "whole");
        assert_eq!(began.elapsed(), SETTLE);
    }

    /// An editor empties the file, writes a part, and then the rest.
    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_being_written_is_read_when_it_is_whole() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "");
        let write = async {
            for part in ["a ", "whole ", "file"] {
                sleep(HALF).await;
                let mut file = OpenOptions::new().append(true).open(&path).unwrap();
                file.write_all(part.as_bytes()).unwrap();
            }
        };
        let (text, ()) = tokio::join!(read_file(&path), write);
        assert_eq!(text.unwrap(), "a whole file");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_never_settles_is_refused() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "");
        let write = async {
            for number in 0.. {
                sleep(HALF).await;
                fs::write(&path, number.to_string()).unwrap();
            }
        };
        let error = tokio::select! {
            text = read_file(&path) => text.unwrap_err(),
            () = write => unreachable!(),
        };
        assert!(
            error.to_string().contains("changes all the time"),
            "{error}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_file_is_refused() {
        let folder = TempDir::new().unwrap();
        let fault = async |path: &Path| read_file(path).await.unwrap_err().to_string();
        assert!(fault(folder.path()).await.contains("not a regular file"));
        assert!(
            fault(Path::new("/dev/zero"))
                .await
                .contains("not a regular file")
        );
        assert!(
            fault(&folder.path().join("none"))
                .await
                .contains("No such file")
        );
        let path = file(&folder, &"#".repeat(MAX_BYTES as usize + 1));
        assert!(fault(&path).await.contains("larger than 1 MiB"));
        fs::write(&path, b"\xff").unwrap();
        assert!(fault(&path).await.contains("UTF-8"));
    }
}
