//! The table, the page and its pictures.

use std::{fmt::Write, fs, path::Path};

use crate::Case;

pub const HEAD: &str = "| upstream | limit | replicas | begun at | work | overloads in 1,000 | after 20 s | within a minute of a fall | to 90 % after a rise | in use at the end |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |";

/// What an upstream has seen so far.
#[derive(Clone, Copy)]
pub struct Line {
    time: f64,
    capacity: f64,
    active: f64,
    requests: f64,
    overloads: f64,
    done: f64,
    possible: f64,
}

impl Line {
    pub fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<f64> = text
            .split(' ')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        let [time, capacity, active, requests, overloads, done, possible] = numbers[..] else {
            return None;
        };
        Some(Self {
            time,
            capacity,
            active,
            requests,
            overloads,
            done,
            possible,
        })
    }
}

pub struct Outcome {
    case: Case,
    lines: Vec<Line>,
}

impl Outcome {
    pub fn new(case: Case, lines: Vec<Line>) -> Self {
        Self { case, lines }
    }

    /// Times at which the capacity falls or rises, with the lines from there to the next change.
    fn changes(&self, falls: bool) -> Vec<&[Line]> {
        let phases: Vec<_> = self
            .lines
            .chunk_by(|one, next| one.capacity == next.capacity)
            .collect();
        let pairs = phases.windows(2);
        let is_meant = |pair: &&[&[Line]]| (pair[1][0].capacity < pair[0][0].capacity) == falls;
        pairs.filter(is_meant).map(|pair| pair[1]).collect()
    }

    /// As a row of the table.
    pub fn row(&self) -> String {
        let Case {
            group,
            limit,
            replicas,
            start,
            ..
        } = &self.case;
        let Some(last) = self.lines.last() else {
            return format!("| {group} | {limit} | {replicas} | {start} | failed ||||||");
        };
        let fall = self.changes(true).first().map_or(String::new(), |lines| {
            let end = lines[0].time + 60.0;
            let within = lines
                .iter()
                .take_while(|line| line.time < end)
                .last()
                .unwrap_or(&lines[0]);
            format!("{}", within.overloads - lines[0].overloads)
        });
        let rise = self.changes(false).last().map_or(String::new(), |lines| {
            let reached = lines.iter().find(|line| line.active >= 0.9 * line.capacity);
            reached.map_or("never".to_owned(), |line| {
                format!("{:.0} s", line.time - lines[0].time)
            })
        });
        let end: Vec<_> = self
            .lines
            .iter()
            .rev()
            .take(60)
            .map(|line| line.active)
            .collect();
        let mean = end.iter().sum::<f64>() / end.len() as f64;
        let work = 100.0 * last.done / last.possible;
        let begun = self
            .lines
            .iter()
            .find(|line| line.time >= 20.0)
            .unwrap_or(last);
        let in_all = 1_000.0 * last.overloads / last.requests.max(1.0);
        let later = 1_000.0 * (last.overloads - begun.overloads)
            / (last.requests - begun.requests).max(1.0);
        format!(
            "| {group} | {limit} | {replicas} | {start} | {work:.0} % | {in_all:.0} | {later:.0} | {fall} | {rise} | {mean:.0} |"
        )
    }

    fn file(&self) -> String {
        let word = |text: &str| text.replace(['%', ' '], "-");
        let Case {
            group,
            limit,
            replicas,
            start,
            ..
        } = &self.case;
        format!("{}-{limit}-{start}-{replicas}.svg", word(group))
    }

    /// Streams in progress, and the capacity.
    fn picture(&self) -> String {
        const SIZE: (f64, f64) = (360.0, 120.0);
        let length = self.lines.last().map_or(1.0, |line| line.time);
        let most = self
            .lines
            .iter()
            .map(|line| line.active.max(line.capacity))
            .fold(1.0, f64::max);
        let points = |of: fn(&Line) -> f64| {
            let point = |line: &Line| {
                format!(
                    "{:.1},{:.1}",
                    line.time / length * SIZE.0,
                    SIZE.1 - of(line) / most * SIZE.1
                )
            };
            self.lines.iter().map(point).collect::<Vec<_>>().join(" ")
        };
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-30 -6 400 150\" font-family=\"sans-serif\" font-size=\"10\" fill=\"none\">\n\
             <rect x=\"-30\" y=\"-6\" width=\"400\" height=\"150\" fill=\"#fff\"/>\n\
             <path d=\"M0 0V{1}H{0}\" stroke=\"#999\"/>\n\
             <polyline points=\"{2}\" stroke=\"#999\" stroke-dasharray=\"4 3\"/>\n\
             <polyline points=\"{3}\" stroke=\"#0b57b0\" stroke-width=\"1.5\"/>\n\
             <g fill=\"#333\"><text x=\"-28\" y=\"8\">{most:.0}</text><text x=\"-10\" y=\"{1}\">0</text>\n\
             <text x=\"0\" y=\"136\">0 s</text><text x=\"{0}\" y=\"136\" text-anchor=\"end\">{length:.0} s</text></g>\n</svg>\n",
            SIZE.0,
            SIZE.1,
            points(|line| line.capacity),
            points(|line| line.active),
        )
    }
}

/// Writes the page, and a picture of each case.
pub fn write(outcomes: &[Outcome]) -> std::io::Result<()> {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pictures = benches.join("adaptive/pictures");
    fs::create_dir_all(&pictures)?;
    let mut page = include_str!("page.md").to_owned();
    writeln!(page, "\n{HEAD}").expect("a string");
    for outcome in outcomes {
        writeln!(page, "{}", outcome.row()).expect("a string");
    }
    let groups = outcomes.chunk_by(|one, next| one.case.group == next.case.group);
    for group in groups {
        writeln!(page, "\n## {}\n", group[0].case.group).expect("a string");
        for outcome in group {
            let (file, name) = (outcome.file(), outcome.case.name());
            fs::write(pictures.join(&file), outcome.picture())?;
            writeln!(page, "{name}:\n\n![{name}](adaptive/pictures/{file})\n").expect("a string");
        }
    }
    fs::write(benches.join("ADAPTIVE.md"), page)
}
