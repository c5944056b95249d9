//! Links between the guide's pages work in the repository as on docs.rs, where `links.md` has their targets.

use std::{fs, path::Path};

#[cfg(feature = "config")]
use tower_turnstile::config::Config;

/// A guide: its folder, and the address of its crate's documentation.
struct Guide {
    folder: &'static str,
    docs: &'static str,
}

const GUIDES: &[Guide] = &[Guide {
    folder: "../src/guide",
    docs: "https://docs.rs/tower-turnstile/latest/tower_turnstile/",
}];
const MODULE: &str = "crate::guide::";

/// Labels and targets of `links.md`.
fn links(folder: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(folder.join("links.md")).unwrap();
    let links = text.lines().filter(|line| !line.is_empty());
    let link = |line: &str| {
        let (label, target) = line.split_once("]: ").expect("a link");
        (label[1..].to_owned(), target.to_owned())
    };
    links.map(link).collect()
}

/// The target of a link in the repository: another page, or an item on docs.rs.
fn in_the_repository(docs: &str, target: &str) -> String {
    match target.strip_prefix(MODULE) {
        Some(page) => match page.split_once('#') {
            Some((page, section)) => format!("{page}.md#{section}"),
            None => format!("{page}.md"),
        },
        None => {
            let item = target.trim_start_matches("crate::");
            format!("{docs}?search={item}&go_to_first=true")
        }
    }
}

#[test]
fn each_page_ends_with_the_links_that_it_uses() {
    let pages: usize = GUIDES.iter().map(check_links).sum();
    assert!(pages > 10, "{pages}");
}

/// Returns the number of pages.
fn check_links(guide: &Guide) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(guide.folder);
    let links = links(&folder);
    let mut pages = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name == "links.md" || !name.ends_with(".md") {
            continue;
        }
        pages += 1;
        let text = fs::read_to_string(&path).unwrap();
        let is_link = |line: &&str| line.starts_with('[') && line.contains("]: ");
        let found: Vec<_> = text.lines().filter(is_link).collect();
        let body = text.lines().take_while(|line| !is_link(line));
        let body = body.collect::<Vec<_>>().join("\n");
        let used = links
            .iter()
            .filter(|(label, _)| body.contains(&format!("[{label}]")));
        let expected: Vec<_> = used
            .map(|(label, target)| format!("[{label}]: {}", in_the_repository(guide.docs, target)))
            .collect();
        assert_eq!(
            found,
            expected,
            "{name} should end with\n\n{}\n",
            expected.join("\n")
        );
        for link in found.iter().filter(|link| !link.contains("https://")) {
            let (_, target) = link.split_once("]: ").unwrap();
            let (page, section) = target.split_once('#').unwrap_or((target, ""));
            let text = fs::read_to_string(folder.join(page));
            let text = text.unwrap_or_else(|_| panic!("{name}: {target}"));
            let anchor = |heading: &str| heading.to_lowercase().replace(' ', "-");
            let headings = text.lines().filter_map(|line| line.strip_prefix("## "));
            let is_there = headings.map(anchor).any(|heading| heading == section);
            assert!(section.is_empty() || is_there, "{name}: {target}");
        }
    }
    pages
}

/// Whoever has only the package can follow what a user needs: links go to the guide on docs.rs.
#[test]
fn the_readme_links_to_pages_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join("README.md")).unwrap();
    let targets = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'));
    let mut pages = 0;
    for (target, _) in targets {
        let path = match target.strip_prefix(&format!("{}guide/", GUIDES[0].docs)) {
            Some(page) => {
                pages += 1;
                let page = if page.is_empty() {
                    "mod.rs"
                } else {
                    &page.replace('/', ".md")
                };
                format!("src/guide/{page}")
            }
            None => target.to_owned(),
        };
        assert!(
            root.join(&path).is_file() && (path == target) != path.starts_with("src/"),
            "{target}"
        );
    }
    assert!(pages > 5, "{pages}");
}

/// The file shown in the guide is valid.
#[cfg(feature = "config")]
#[test]
fn the_file_of_the_guide_is_valid() {
    let page = include_str!("../src/guide/config_file.md");
    let (_, rest) = page.split_once("```toml\n").expect("a file");
    let (file, _) = rest.split_once("```").expect("its end");
    let config = Config::from_toml(file).unwrap();
    assert_eq!(config.limits.len(), 3);
}

#[test]
fn the_table_of_defaults_is_true() {
    let builder = format!("{:?}", tower_turnstile::Limiter::builder());
    let page = include_str!("../src/guide/bounds.md");
    for (name, value) in [
        ("lease", "30 s"),
        ("store_timeout", "500 ms"),
        ("poll_interval", "1 s"),
        ("waiter_ttl", "5 s"),
    ] {
        let field = format!("{name}: {}", value.replace(' ', ""));
        assert!(builder.contains(&field), "{field} in {builder}");
        let row = format!("| `{name}` | limiter | {value} |");
        assert!(page.contains(&row), "{row}");
    }
}
