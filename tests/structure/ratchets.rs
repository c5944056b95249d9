//! Figures of the source that only go down: each has a bound, which is today's value.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Block, Ident, ImplItem, ImplItemFn, Item, ItemFn, ItemMod, UseTree, Visibility,
    spanned::Spanned,
    visit::{self, Visit},
};

use crate::{
    fields::Fields,
    manifests::tree,
    source::{SOURCES, is_test, repository, sources},
};

/// Lines of a function, from its first to its last brace.
const LONG: usize = 60;
/// Lines of a function of the script.
const LONG_IN_LUA: usize = 80;

/// The figures, and their bounds.
const BOUNDS: &[(&str, usize)] = &[
    ("methods of `Core`", 143),
    ("methods of `Queue`", 123),
    ("methods of any other type of the keeper", 45),
    ("methods of the largest machine", 27),
    ("fields of `Core`", 13),
    ("fields of `Queue`", 10),
    ("files that write one field of `Core`", 1),
    ("files that write one field of `Queue`", 0),
    (
        "files that write one field of any other type of the keeper",
        4,
    ),
    ("members of the keeper less visible than their type", 77),
    ("functions above 60 lines", 0),
    ("functions of the script above 80 lines", 0),
    ("names that several types have", 0),
    ("public types", 63),
    ("public methods and constants of `Limit`", 29),
    (
        "lines that name the feature `operate` outside its folders",
        9,
    ),
    ("items of the seam", 29),
    ("lines of the library", 32_873),
    ("lines of config", 2513),
    ("lines of keeper", 10_764),
    ("lines of layer", 3644),
    ("lines of leases", 1284),
    ("lines of ledger", 3_642),
    ("lines of limit", 763),
    ("lines of operable", 296),
    ("lines of operate", 1949),
    ("lines of overrides", 1113),
    ("lines of store", 2_916),
    ("lines of telemetry", 966),
    // With its small folders.
    ("lines of the root", 3023),
    ("lines of gateway", 3074),
    ("lines of operators", 8489),
    ("dependencies by default", 75),
    ("dependencies with all features", 111),
];

#[test]
fn figures_only_go_down() {
    let figures = figures();
    let mut above = Vec::new();
    for (name, figure) in &figures {
        let (_, bound) = BOUNDS
            .iter()
            .find(|(known, _)| known == name)
            .unwrap_or_else(|| panic!("{name} ({figure}) has no bound"));
        println!("{figure:6} of {bound:6}  {name}");
        if figure > bound {
            above.push(format!("{name}: {figure}, at most {bound}"));
        }
    }
    assert_eq!(figures.len(), BOUNDS.len(), "a bound of nothing");
    assert!(above.is_empty(), "{above:#?}");
}

/// What a file exports by `pub use`.
fn exported(file: &syn::File) -> usize {
    fn names(tree: &UseTree) -> usize {
        match tree {
            UseTree::Path(path) => names(&path.tree),
            UseTree::Group(group) => group.items.iter().map(names).sum(),
            _ => 1,
        }
    }
    let exports = file.items.iter().filter_map(|item| match item {
        Item::Use(one) if matches!(one.vis, Visibility::Public(_)) => Some(names(&one.tree)),
        _ => None,
    });
    exports.sum()
}

fn figures() -> Vec<(String, usize)> {
    let mut read = Read::default();
    let root = repository().join("src");
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    let all = sources("src", "lib.rs");
    let (mut operate, mut lua) = (0, 0);
    for path in files(&root) {
        let text = fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        if path.extension().is_some_and(|extension| extension == "lua") {
            lua += long_in_lua(&text);
            let (folder, _) = name.split_once('/').unwrap();
            *lines.entry(folder.to_owned()).or_default() += code(&text, "--");
            continue;
        }
        let Some(source) = all.iter().find(|one| one.name == name) else {
            continue;
        };
        if name.starts_with("guide/") {
            continue;
        }
        let is_own = name.starts_with("operate/");
        let names_it = |line: &&str| line.contains(r#"feature = "operate""#);
        operate += text.lines().filter(names_it).filter(|_| !is_own).count();
        let file = syn::parse_file(&text).unwrap();
        let (folder, _) = name.split_once('/').unwrap_or_default();
        let is_bounded = BOUNDS
            .iter()
            .any(|(name, _)| *name == format!("lines of {folder}"));
        read.folder = if is_bounded { folder } else { "the root" }.to_owned();
        read.file = name.clone();
        read.module = source.module.join("::");
        read.visit_file(&file);
        *lines.entry(read.folder.clone()).or_default() += code_of(&path);
    }
    let command = ("operators/src/bin/turnstile", "main.rs");
    for (folder, first) in SOURCES[1..].iter().chain([&command]) {
        let (package, _) = folder.split_once('/').unwrap();
        for source in sources(folder, first) {
            let path = repository().join(folder).join(&source.name);
            *lines.entry(package.to_owned()).or_default() += code_of(&path);
            (read.folder, read.file) = (package.to_owned(), format!("{folder}/{}", source.name));
            (read.package, read.module) = (package.to_owned(), source.name.clone());
            read.visit_file(&syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap());
        }
    }
    let methods = |of: &str| read.methods.get(of).copied().unwrap_or_default();
    let others = |is_counted: &dyn Fn(&str) -> bool| {
        let others = read.methods.iter().filter(|(of, _)| {
            let is_machine = !["Core", "Queue"].contains(&of.as_str());
            is_machine && is_counted(of)
        });
        let (of, count) = others.max_by_key(|(_, count)| **count).unwrap();
        println!("most methods of a type or machine: {count} of `{of}`");
        *count
    };
    let keeper = all
        .iter()
        .filter(|source| source.name.starts_with("keeper/"));
    let keeper: Vec<_> = keeper.collect();
    let fields = Fields::read(&keeper);
    let most_writers = |is_counted: &dyn Fn(&str) -> bool| {
        let mut writers: Vec<_> = fields.writers.iter().collect();
        writers.retain(|((of, _), _)| is_counted(of));
        writers.sort_by_key(|(_, files)| Reverse(files.len()));
        for ((of, field), files) in writers.iter().take(3) {
            println!(
                "`{of}::{field}` is written by {} files: {files:?}",
                files.len()
            );
        }
        writers.first().map_or(0, |(_, files)| files.len())
    };
    let several = read.types.iter().filter(|(_, modules)| modules.len() > 1);
    let several = several.inspect(|(name, modules)| println!("{name:?} in {modules:?}"));
    let mut figures = vec![
        ("methods of `Core`".to_owned(), methods("Core")),
        ("methods of `Queue`".to_owned(), methods("Queue")),
        (
            "methods of any other type of the keeper".to_owned(),
            others(&|_| true),
        ),
        (
            "methods of the largest machine".to_owned(),
            others(&|of| fields.is_closed(of)),
        ),
        ("fields of `Core`".to_owned(), fields.of("Core")),
        ("fields of `Queue`".to_owned(), fields.of("Queue")),
        (
            "files that write one field of `Core`".to_owned(),
            most_writers(&|of| of == "Core"),
        ),
        (
            "files that write one field of `Queue`".to_owned(),
            most_writers(&|of| of == "Queue"),
        ),
        (
            "files that write one field of any other type of the keeper".to_owned(),
            most_writers(&|of| !["Core", "Queue"].contains(&of)),
        ),
        (
            "members of the keeper less visible than their type".to_owned(),
            (keeper.iter().flat_map(|source| &source.members))
                .filter(|(.., seen)| seen.is_some())
                .count(),
        ),
        ("functions above 60 lines".to_owned(), read.long),
        ("functions of the script above 80 lines".to_owned(), lua),
        ("names that several types have".to_owned(), several.count()),
        ("public types".to_owned(), read.public.len()),
        (
            "public methods and constants of `Limit`".to_owned(),
            read.of_limit,
        ),
        (
            "lines that name the feature `operate` outside its folders".to_owned(),
            operate,
        ),
        ("dependencies by default".to_owned(), dependencies(&[])),
        (
            "dependencies with all features".to_owned(),
            dependencies(&["--all-features"]),
        ),
    ];
    // What serves those who look from outside is in packages of its own.
    let of_library = lines
        .iter()
        .filter(|(folder, _)| !["gateway", "operators"].contains(&folder.as_str()));
    let of_library = of_library.map(|(_, lines)| lines).sum();
    figures.push(("lines of the library".to_owned(), of_library));
    let seam = fs::read_to_string(root.join("operate/seam.rs")).unwrap();
    figures.push((
        "items of the seam".to_owned(),
        exported(&syn::parse_file(&seam).unwrap()),
    ));
    let lines = lines.into_iter();
    figures.extend(lines.map(|(folder, lines)| (format!("lines of {folder}"), lines)));
    figures
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_code = name.ends_with(".rs") || name.ends_with(".lua");
        if path.is_dir() {
            found.append(&mut files(&path));
        } else if is_code {
            found.push(path);
        }
    }
    found
}

/// Lines of a file without its tests.
fn code_of(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap();
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    code(&text[..tests], "//")
}

/// Lines that are neither blank nor comments.
fn code(text: &str, comment: &str) -> usize {
    let lines = text.lines().map(str::trim_start);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with(comment))
        .count()
}

/// Functions of this text that are too long: their ends are as far from the margin as their beginnings.
fn long_in_lua(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let begins = |line: &str| {
        let line = line.trim_start();
        line.starts_with("function ") || line.starts_with("local function ")
    };
    let mut long = 0;
    for (number, line) in lines.iter().enumerate().filter(|(_, line)| begins(line)) {
        let margin = line.len() - line.trim_start().len();
        let end = format!("{}end", " ".repeat(margin));
        let end = lines[number..].iter().position(|line| *line == end);
        long += usize::from(end.expect("it ends") > LONG_IN_LUA);
    }
    long
}

/// Unique names of packages, without the library itself.
fn dependencies(flags: &[&str]) -> usize {
    let library = ["--package", "tower-turnstile", "--edges", "normal"];
    let listed = tree(&[&library[..], flags].concat());
    let names = listed.iter().filter_map(|line| line.split(' ').next());
    names.collect::<BTreeSet<_>>().len() - 1
}

#[derive(Default)]
struct Read {
    /// Empty for the library.
    package: String,
    folder: String,
    file: String,
    module: String,
    /// Methods of the keeper's types, without those of traits.
    methods: BTreeMap<String, usize>,
    /// The modules of a package that define a type of this name: one module may have two files, of which one is built.
    types: BTreeMap<(String, String), BTreeSet<String>>,
    /// Re-exported by the root or by a public module.
    public: BTreeSet<String>,
    long: usize,
    /// Public methods and constants of `Limit`.
    of_limit: usize,
}

impl Read {
    fn note_block(&mut self, block: &Block, name: &Ident) {
        let lines = block.span().end().line - block.span().start().line;
        if lines > LONG {
            println!("{lines} lines: `{name}` in {}", self.file);
            self.long += 1;
        }
    }

    fn export(&mut self, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => self.export(&path.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.export(tree)),
            UseTree::Name(name) if name.ident.to_string().starts_with(char::is_uppercase) => {
                self.public.insert(name.ident.to_string());
            }
            _ => {}
        }
    }
}

impl<'a> Visit<'a> for Read {
    fn visit_item(&mut self, item: &'a Item) {
        let (attributes, name) = match item {
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Impl(item) => (&item.attrs, None),
            Item::Fn(item) => (&item.attrs, None),
            Item::Use(item) => (&item.attrs, None),
            _ => return visit::visit_item(self, item),
        };
        if is_test(attributes) {
            return;
        }
        if let Some(name) = name {
            let name = (self.package.clone(), name.to_string());
            let modules = self.types.entry(name).or_default();
            modules.insert(self.module.clone());
        }
        let is_face = ["lib.rs", "admin/mod.rs", "config/mod.rs", "layer/mod.rs"];
        let is_face = is_face
            .iter()
            .chain(&["operate/mod.rs", "test_util/mod.rs"]);
        if let Item::Use(item) = item
            && matches!(item.vis, Visibility::Public(_))
            && { is_face }.any(|face| *face == self.file)
        {
            self.export(&item.tree);
        }
        if let Item::Impl(block) = item
            && block.trait_.is_none()
            && let syn::Type::Path(of) = &*block.self_ty
        {
            let of = of.path.segments.last().unwrap().ident.to_string();
            for item in &block.items {
                let (is_method, visibility) = match item {
                    ImplItem::Fn(item) if !is_test(&item.attrs) => (true, &item.vis),
                    ImplItem::Const(item) => (false, &item.vis),
                    _ => continue,
                };
                let is_public = matches!(visibility, Visibility::Public(_));
                self.of_limit += usize::from(of == "Limit" && is_public);
                if is_method && self.folder == "keeper" {
                    *self.methods.entry(of.clone()).or_default() += 1;
                }
            }
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a ItemFn) {
        self.note_block(&item.block, &item.sig.ident);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'a ImplItemFn) {
        if !is_test(&item.attrs) {
            self.note_block(&item.block, &item.sig.ident);
            visit::visit_impl_item_fn(self, item);
        }
    }
}
