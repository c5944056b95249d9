//! The structure of the source, read from the source itself: imports point downward, and neither imports nor calls go in a
//! circle.
//!
//! The way of a permit in ARCHITECTURE.md is that of the source, and its map names what there is. `cargo test --test structure
//! -- --nocapture` prints figures: files, lines, items, calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{
    Attribute, Expr, ExprMethodCall, File, ImplItem, Item, TraitItem, UseTree, Visibility,
    visit::{self, Visit},
};

/// A path of modules from the root of the crate.
type Module = Vec<String>;

/// A file of the library that is no test.
#[derive(Default)]
struct Source {
    /// Below `src/`.
    name: String,
    module: Module,
    /// Lines before the tests.
    lines: usize,
    /// Items that it defines, and modules that it declares.
    defines: BTreeSet<String>,
    /// Names that stand for paths: by `use`, also those that it passes on.
    imports: BTreeMap<String, Vec<String>>,
    /// Functions and methods that it defines.
    functions: BTreeSet<String>,
    /// Paths that are written out.
    paths: BTreeSet<Vec<String>>,
    /// Methods that it calls, and functions by a path of one segment.
    calls: BTreeSet<String>,
    /// `pub(super)`, `pub(crate)` and the like.
    restricted: usize,
    /// Types that it defines, and where they are seen.
    types: BTreeMap<String, Module>,
    /// Methods and fields by the name of their type, and where they are seen if they say so: `pub` says nothing.
    members: Vec<(String, String, Option<Module>)>,
    /// Items that are seen everywhere, in a file that is not.
    open_items: Vec<String>,
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = match &attribute.meta {
            syn::Meta::List(list) if list.path.is_ident("cfg") => list.tokens.to_string(),
            _ => return attribute.path().is_ident("test"),
        };
        if text.contains("\"test-util\"") {
            return false;
        }
        let words: Vec<_> = text.split(|c: char| !c.is_alphanumeric()).collect();
        words.contains(&"test") && !words.contains(&"not")
    })
}

/// All files that the crate is made of without its tests, from `lib.rs` on.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    let mut open = vec![(root.join("lib.rs"), root.clone(), Module::new())];
    while let Some((path, folder, module)) = open.pop() {
        let text = fs::read_to_string(&path).unwrap();
        let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        for item in &file.items {
            if let Item::Mod(declared) = item
                && declared.content.is_none()
                && !is_test(&declared.attrs)
            {
                let name = declared.ident.to_string();
                let (path, folder) = found(&folder, &name, &declared.attrs);
                let module = module.iter().cloned().chain([name]).collect();
                open.push((path, folder, module));
            }
        }
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        let mut source = Source {
            name,
            module,
            lines: text[..tests].lines().count(),
            ..Source::default()
        };
        source.read(&file);
        sources.push(source);
    }
    sources.sort_by(|one, other| one.name.cmp(&other.name));
    sources
}

/// The file of a module, and the folder of those that it declares.
fn found(folder: &Path, name: &str, attributes: &[Attribute]) -> (PathBuf, PathBuf) {
    let inner = folder.join(name);
    for attribute in attributes {
        if let syn::Meta::NameValue(value) = &attribute.meta
            && value.path.is_ident("path")
            && let Expr::Lit(literal) = &value.value
            && let syn::Lit::Str(text) = &literal.lit
        {
            return (folder.join(text.value()), inner);
        }
    }
    let file = folder.join(format!("{name}.rs"));
    match file.exists() {
        true => (file, inner),
        false => (inner.join("mod.rs"), inner),
    }
}

impl Source {
    fn read(&mut self, file: &File) {
        for item in &file.items {
            self.read_item(item);
        }
    }

    fn read_item(&mut self, item: &Item) {
        let (attributes, name) = match item {
            Item::Const(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
            Item::Mod(item) => (&item.attrs, Some(&item.ident)),
            Item::Static(item) => (&item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.attrs, Some(&item.ident)),
            Item::Use(item) => (&item.attrs, None),
            Item::Impl(item) => (&item.attrs, None),
            Item::Macro(item) => (&item.attrs, None),
            _ => return,
        };
        if is_test(attributes) {
            return;
        }
        self.defines.extend(name.map(ToString::to_string));
        match item {
            Item::Use(item) => self.read_use(&item.tree, &mut Vec::new()),
            Item::Fn(item) => drop(self.functions.insert(item.sig.ident.to_string())),
            // What a macro makes, such as `pin_project!`.
            Item::Macro(item) => self.read_tokens(item.mac.tokens.clone()),
            Item::Trait(item) => {
                for item in &item.items {
                    if let TraitItem::Fn(function) = item {
                        self.functions.insert(function.sig.ident.to_string());
                    }
                }
            }
            _ => {}
        }
        self.read_visibility(item);
        if let Item::Impl(block) = item {
            // The methods of a trait are found by its own file.
            let of_trait = block.trait_.is_some();
            let functions = block.items.iter().filter_map(|item| match item {
                ImplItem::Fn(function) if !of_trait && !is_test(&function.attrs) => Some(function),
                _ => None,
            });
            let names = functions.map(|function| function.sig.ident.to_string());
            self.functions.extend(names);
        }
        self.visit_item(item);
    }

    /// How far items are seen, and their methods and fields.
    fn read_visibility(&mut self, item: &Item) {
        let (name, visibility, fields) = match item {
            Item::Struct(item) => (&item.ident, &item.vis, Some(&item.fields)),
            Item::Enum(item) => (&item.ident, &item.vis, None),
            Item::Const(item) => (&item.ident, &item.vis, None),
            Item::Fn(item) => (&item.sig.ident, &item.vis, None),
            Item::Mod(item) => (&item.ident, &item.vis, None),
            Item::Static(item) => (&item.ident, &item.vis, None),
            Item::Trait(item) => (&item.ident, &item.vis, None),
            Item::Type(item) => (&item.ident, &item.vis, None),
            Item::Use(item) => {
                if let Visibility::Public(_) = item.vis {
                    self.open_items.push("use".into());
                }
                return;
            }
            Item::Impl(block) if block.trait_.is_none() => return self.read_methods(block),
            _ => return,
        };
        let name = name.to_string();
        if let Visibility::Public(_) = visibility {
            self.open_items.push(name.clone());
        }
        for field in fields.into_iter().flatten() {
            let member = field.ident.as_ref().map_or("0".into(), ToString::to_string);
            self.read_member(&name, member, &field.vis);
        }
        if let Item::Struct(_) | Item::Enum(_) = item {
            let seen = self.seen(visibility).unwrap_or_default();
            self.types.insert(name, seen);
        }
    }

    fn read_methods(&mut self, block: &syn::ItemImpl) {
        let syn::Type::Path(of_type) = &*block.self_ty else {
            return;
        };
        let of_type = of_type.path.segments.last().unwrap().ident.to_string();
        for item in &block.items {
            if let ImplItem::Fn(method) = item
                && !is_test(&method.attrs)
            {
                self.read_member(&of_type, method.sig.ident.to_string(), &method.vis);
            }
        }
    }

    fn read_member(&mut self, of_type: &str, name: String, visibility: &Visibility) {
        if !matches!(visibility, Visibility::Inherited) {
            let seen = self.seen(visibility);
            self.members.push((of_type.to_owned(), name, seen));
        }
    }

    /// The module in which it is seen; `None` if that is everywhere.
    fn seen(&self, visibility: &Visibility) -> Option<Module> {
        let Visibility::Restricted(restricted) = visibility else {
            let is_private = matches!(visibility, Visibility::Inherited);
            return is_private.then(|| self.module.clone());
        };
        let segments = restricted.path.segments.iter();
        let segments: Vec<_> = segments.map(|segment| segment.ident.to_string()).collect();
        let (first, rest) = segments.split_first().unwrap();
        Some(match &**first {
            "super" => self.module[..self.module.len() - 1].to_vec(),
            _ => rest.to_vec(),
        })
    }

    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut last = String::new();
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if matches!(&*last, "struct" | "enum") {
                        self.defines.insert(ident.to_string());
                    }
                    last = ident.to_string();
                }
                TokenTree::Group(group) => self.read_tokens(group.stream()),
                _ => last.clear(),
            }
        }
    }

    fn read_use(&mut self, tree: &UseTree, path: &mut Vec<String>) {
        match tree {
            UseTree::Path(segment) => {
                path.push(segment.ident.to_string());
                self.read_use(&segment.tree, path);
                path.pop();
            }
            UseTree::Name(name) => self.import(name.ident.to_string(), &name.ident, path),
            UseTree::Rename(rename) => {
                self.import(rename.rename.to_string(), &rename.ident, path);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.read_use(tree, path);
                }
            }
            UseTree::Glob(_) => {}
        }
    }

    fn import(&mut self, name: String, item: &syn::Ident, path: &[String]) {
        let mut whole = path.to_vec();
        match item == "self" {
            true => {
                let name = whole.last().cloned().unwrap_or_default();
                self.imports.insert(name, whole);
            }
            false => {
                whole.push(item.to_string());
                self.imports.insert(name, whole);
            }
        }
    }
}

impl<'ast> Visit<'ast> for Source {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_visibility(&mut self, visibility: &'ast Visibility) {
        if let Visibility::Restricted(_) = visibility {
            self.restricted += 1;
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        let segments: Vec<_> = segments.collect();
        // A variable may have the name of a module.
        let is_variable = |first: &String| first.starts_with(char::is_lowercase);
        if segments.len() > 1 || !segments.first().is_some_and(is_variable) {
            self.paths.insert(segments);
        }
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.calls.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let Expr::Path(path) = &*call.func
            && let Some(last) = path.path.segments.last()
        {
            self.calls.insert(last.ident.to_string());
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_macro(&mut self, made: &'ast syn::Macro) {
        // Arguments of `matches!`, `tracing::warn!` and the like, as far as they are expressions.
        let parser = syn::punctuated::Punctuated::<Expr, syn::Token![,]>::parse_terminated;
        if let Ok(arguments) = made.parse_body_with(parser) {
            for argument in &arguments {
                // They live for as long as this visit.
                let mut inner = Self::default();
                inner.visit_expr(argument);
                self.paths.append(&mut inner.paths);
                self.calls.append(&mut inner.calls);
            }
        }
    }
}

/// The crate, with what leads to what.
struct Crate {
    sources: Vec<Source>,
    by_module: BTreeMap<Module, usize>,
}

type Graph = BTreeMap<usize, BTreeSet<usize>>;

impl Crate {
    fn read() -> Self {
        let sources = sources();
        let by_module = sources.iter().enumerate();
        let by_module = by_module
            .map(|(number, source)| (source.module.clone(), number))
            .collect();
        Self { sources, by_module }
    }

    /// The file that defines what a path leads to, as seen from a module.
    fn resolve(&self, from: &Module, path: &[String], depth: usize) -> Option<usize> {
        let (first, rest) = path.split_first()?;
        let parent = || from[..from.len().saturating_sub(1)].to_vec();
        let (module, rest) = match &**first {
            "crate" => (Module::new(), rest),
            "self" => (from.clone(), rest),
            "super" => (parent(), rest),
            _ => (from.clone(), path),
        };
        if let Some((next, _)) = rest.split_first()
            && next == "super"
        {
            return self.resolve(&module, rest, depth);
        }
        self.resolve_in(&module, rest, depth)
    }

    /// As [`resolve`](Self::resolve), from this module downward.
    fn resolve_in(&self, module: &Module, path: &[String], depth: usize) -> Option<usize> {
        let number = *self.by_module.get(module)?;
        let source = &self.sources[number];
        let Some((first, rest)) = path.split_first() else {
            return Some(number);
        };
        let inner: Module = module.iter().cloned().chain([first.clone()]).collect();
        if self.by_module.contains_key(&inner) {
            return self.resolve_in(&inner, rest, depth);
        }
        if source.defines.contains(first) {
            return Some(number);
        }
        let passed_on = source.imports.get(first)?;
        // An external crate, or a circle of names.
        if depth > 8 {
            return None;
        }
        let whole: Vec<_> = passed_on.iter().chain(rest).cloned().collect();
        self.resolve(module, &whole, depth + 1)
    }

    /// What each file imports, or names by a path.
    fn imports(&self) -> Graph {
        let of = |(number, source): (usize, &Source)| {
            let paths = source.imports.values().chain(&source.paths);
            let others = paths.filter_map(|path| self.resolve(&source.module, path, 0));
            (number, others.filter(|other| *other != number).collect())
        };
        self.sources.iter().enumerate().map(of).collect()
    }

    /// Which files of a folder call functions of which, by their names. A file can call only what is beside it, or below
    /// what it imports: so one method is not taken for another of its name.
    fn calls(&self, folder: &str, imports: &Graph) -> Graph {
        let within = |source: &Source| source.name.starts_with(folder);
        let parent = |number: usize| {
            let name = &self.sources[number].name;
            name.rsplit_once('/').map_or("", |(parent, _)| parent)
        };
        let mut homes: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        let mut graph = Graph::new();
        for (number, source) in self.sources.iter().enumerate() {
            if within(source) {
                graph.insert(number, BTreeSet::new());
                for function in &source.functions {
                    homes.entry(function).or_default().insert(number);
                }
            }
        }
        for (&number, called) in &mut graph {
            let source = &self.sources[number];
            let reachable: BTreeSet<&str> = reach(imports, number)
                .into_iter()
                .chain([number])
                .map(parent)
                .collect();
            for name in source
                .calls
                .iter()
                .filter(|name| !OF_STD.contains(&&***name))
            {
                let homes = homes.get(&**name).into_iter().flatten();
                let homes: Vec<_> = homes
                    .filter(|home| reachable.contains(parent(**home)))
                    .collect();
                if let [&home] = homes[..]
                    && home != number
                {
                    called.insert(home);
                }
            }
        }
        graph
    }

    fn name(&self, number: usize) -> &str {
        &self.sources[number].name
    }
}

/// In the keeper a type says how far it is seen. A member that is seen as far is `pub`; one that is not says how far. So the
/// interface of a type and what its files share can be told apart, and counted.
#[test]
fn methods_of_the_keeper_say_less_than_their_type_or_nothing() {
    let all = Crate::read();
    let within = |source: &&Source| source.name.starts_with("keeper/");
    let keeper: Vec<_> = all.sources.iter().filter(within).collect();
    let types: BTreeMap<&String, &Module> = keeper.iter().flat_map(|s| &s.types).collect();
    let (mut interface, mut internal) = (0, 0);
    for source in &keeper {
        let open = &source.open_items;
        assert!(open.is_empty(), "`{}`: `pub` {open:?}", source.name);
        for (of_type, member, seen) in &source.members {
            let Some(seen) = seen else {
                interface += 1;
                continue;
            };
            internal += 1;
            let of_type = types.get(of_type);
            let of_type =
                of_type.unwrap_or_else(|| panic!("`{member}` is of no type that was read"));
            assert!(
                !of_type.starts_with(seen),
                "`{}`: `{member}` is seen as far as its type, so it is `pub`",
                source.name
            );
        }
    }
    println!(
        "keeper: methods and fields as visible as their types {interface}, less visible {internal}"
    );
    assert!(interface > 200 && internal > 50, "the reader finds too few");
}

/// Methods of the standard library that types of ours have too.
const OF_STD: [&str; 21] = [
    "clone", "collect", "contains", "count", "default", "drop", "end", "find", "first", "get",
    "insert", "is_empty", "is_none", "len", "new", "next", "poll", "push", "remove", "sleep",
    "take",
];

/// What a file leads to.
fn reach(graph: &Graph, from: usize) -> BTreeSet<usize> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(next) = open.pop() {
        let new = graph.get(&next).into_iter().flatten();
        open.extend(new.filter(|next| seen.insert(**next)));
    }
    seen
}

/// The sets of files that lead to each other.
fn circles(graph: &Graph) -> Vec<Vec<usize>> {
    let reached: BTreeMap<usize, BTreeSet<usize>> = graph
        .keys()
        .map(|&from| (from, reach(graph, from)))
        .collect();
    let mut circles: BTreeSet<Vec<usize>> = BTreeSet::new();
    for (&one, seen) in &reached {
        if seen.contains(&one) {
            let circle = seen.iter().filter(|other| reached[other].contains(&one));
            circles.insert(circle.copied().collect());
        }
    }
    circles.into_iter().collect()
}

/// The folders and files of `src/`, from the top down: each imports only what is in its own layer or below.
const LAYERS: [&[&str]; 9] = [
    &["lib.rs", "fuzzing.rs"],
    &["admin", "config"],
    &["layer"],
    &[
        "attached.rs",
        "builder.rs",
        "charges.rs",
        "limiter.rs",
        "operate",
        "semaphore.rs",
        "permit.rs",
        "test_util",
    ],
    &["keeper"],
    &["operable", "store", "telemetry", "leases"],
    &["overrides"],
    &["limit", "home.rs", "repoll.rs"],
    &[
        "error.rs",
        "key.rs",
        "ledger",
        "part.rs",
        "permit_id.rs",
        "ranges.rs",
        "small_map.rs",
        "status.rs",
        "sync",
    ],
];

impl Crate {
    fn layer(&self, number: usize) -> usize {
        let name = self.name(number);
        let top = name.split('/').next().unwrap();
        let found = LAYERS.iter().position(|layer| layer.contains(&top));
        found.unwrap_or_else(|| panic!("`{name}` is in no layer"))
    }

    fn names(&self, circles: &[Vec<usize>]) -> Vec<Vec<&str>> {
        let named = |circle: &Vec<usize>| circle.iter().map(|file| self.name(*file)).collect();
        circles.iter().map(named).collect()
    }
}

#[test]
fn imports_go_in_no_circle() {
    let all = Crate::read();
    let circles = circles(&all.imports());
    assert!(circles.is_empty(), "{:#?}", all.names(&circles));
}

#[test]
fn imports_point_downward() {
    let all = Crate::read();
    let mut upward = Vec::new();
    for (&from, imports) in &all.imports() {
        for &to in imports {
            if all.layer(to) < all.layer(from) {
                upward.push((all.name(from), all.name(to)));
            }
        }
    }
    assert!(upward.is_empty(), "{upward:#?}");
}

/// Of all files of the keeper, the one part where methods of a type are in several files.
#[test]
fn calls_go_in_no_circle() {
    let all = Crate::read();
    let circles = circles(&all.calls("keeper/", &all.imports()));
    assert!(circles.is_empty(), "{:#?}", all.names(&circles));
}

/// The reader finds what it should: without this, a change of the layout could leave it with nothing to check.
#[test]
fn the_reader_sees_imports_and_calls() {
    let all = Crate::read();
    let number = |name: &str| {
        let mut sources = all.sources.iter();
        sources.position(|source| source.name == name).unwrap()
    };
    let imports = all.imports();
    let calls = all.calls("keeper/", &imports);
    assert!(imports[&number("permit.rs")].contains(&number("keeper/keepers.rs")));
    assert!(imports[&number("keeper/queue/local.rs")].contains(&number("keeper/queue/mod.rs")));
    assert!(calls[&number("keeper/core/claims.rs")].contains(&number("keeper/queue/requests.rs")));
    assert!(calls[&number("keeper/queue/local.rs")].contains(&number("keeper/queue/permit.rs")));
}

/// A permit's way, from `acquire()` to Redis and back: the steps of ARCHITECTURE.md, each with its functions. A function is
/// called by the nearest one above it that stands further left. One at the left is not called by the step before: between
/// them are the outbox, the wake-up of the driver, the connection, the waker of the request.
const WAY: [(&str, &str); 8] = [
    (
        "1",
        "semaphore.rs Acquire::poll
           keeper/request.rs Request::poll
             keeper/request.rs KeeperRequest::poll
               keeper/request.rs KeeperRequest::ask",
    ),
    (
        "2",
        "keeper/lock.rs Keeper::with_need
           keeper/lock.rs Keeper::with_driver
             keeper/lock.rs Keeper::step
               keeper/lock.rs DriverState::nudge
                 keeper/lock.rs DriverState::wake
             keeper/lock.rs Afterwards::run",
    ),
    (
        "3",
        "keeper/core/requests.rs Core::submit
           keeper/core/requests.rs Core::try_submit
             keeper/core/requests.rs Core::submit_slot
               keeper/core/queues.rs Queues::find_or_make
                 keeper/core/queues.rs Queues::of_key
               keeper/core/queues.rs Queues::change
                 keeper/core/queues.rs Queues::list
               keeper/queue/requests.rs Queue::submit
                 keeper/queue/permit.rs Queue::enter
                 keeper/queue/permit.rs Queue::ask_for",
    ),
    (
        "4",
        "keeper/driver.rs drive
           keeper/lock.rs DriverState::next_step
             keeper/core/exchange.rs Core::next_exchange
               keeper/core/exchange.rs Core::fill
                 keeper/core/exchange.rs Core::draft_all
                   keeper/core/exchange.rs Core::draft_queues
                     keeper/core/exchange.rs Draft::add_batch
                       keeper/queue/exchange.rs Queue::take_batch
                         keeper/queue/exchange.rs Queue::take_newcomers
                           keeper/queue/permit.rs Entry::send
               keeper/core/exchange.rs Core::send",
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
             keeper/driver.rs InFlight::outcome",
    ),
    (
        "6",
        "keeper/core/exchange.rs Core::on_reply
           keeper/core/exchange.rs Core::answered
             keeper/queue/exchange.rs Queue::on_answer
               keeper/queue/exchange.rs Queue::acquired
                 keeper/queue/exchange.rs Queue::granted
                   keeper/queue/permit.rs Queue::hold
                     keeper/queue/permit.rs Queue::set
                       keeper/effects.rs Effects::wake",
    ),
    (
        "7",
        "keeper/lock.rs Keeper::driver_step
           keeper/lock.rs Afterwards::run
             keeper/effects.rs Effects::run
               keeper/effects.rs Effects::run_all
                 keeper/effects.rs Effect::run",
    ),
    (
        "8",
        "keeper/request.rs KeeperRequest::poll
           keeper/request.rs KeeperRequest::collect
             keeper/core/requests.rs Core::collect
               keeper/core/requests.rs Core::collect_slot
                 keeper/queue/requests.rs Queue::take
                   keeper/queue/permit.rs Entry::hand_over
         semaphore.rs Acquire::poll
           permit.rs Permit::new",
    ),
];

/// Calls from one step to the next.
const BETWEEN: [[&str; 2]; 5] = [
    [
        "keeper/request.rs KeeperRequest::ask",
        "keeper/lock.rs Keeper::with_need",
    ],
    [
        "keeper/request.rs KeeperRequest::ask",
        "keeper/core/requests.rs Core::submit",
    ],
    ["keeper/driver.rs drive", "keeper/driver.rs InFlight::send"],
    [
        "keeper/driver.rs drive",
        "keeper/core/exchange.rs Core::on_reply",
    ],
    [
        "keeper/driver.rs drive",
        "keeper/lock.rs Keeper::driver_step",
    ],
];

/// A step's functions, each with the one that calls it.
fn functions_of(step: &'static str) -> Vec<(Option<&'static str>, &'static str)> {
    let mut callers: Vec<(usize, &str)> = Vec::new();
    let mut functions = Vec::new();
    for (number, line) in step.lines().enumerate() {
        // The first line stands behind a quotation mark.
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

/// What each function of a file calls, by its name: `Type::method`, or `function`. A call is a name, with the type if it
/// stands before it.
#[derive(Default)]
struct Calls(BTreeMap<String, BTreeSet<(Option<String>, String)>>);

impl Calls {
    fn of(file: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let mut calls = Self::default();
        calls.read(text.parse().unwrap(), "");
        calls
    }

    /// Finds functions, here and in blocks of `impl`.
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
            // Of methods the type is not known.
            _ => true,
        })
    }
}

/// The type that a block of `impl` is for, without its arguments.
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

/// Names before an argument list, and paths that are passed on.
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

/// Each function on the way calls the next one, and the table of ARCHITECTURE.md has their files.
#[test]
fn a_permit_goes_its_way() {
    let mut read: BTreeMap<&str, Calls> = BTreeMap::new();
    let mut files = BTreeSet::new();
    let mut calls: BTreeSet<(&str, &str)> = BETWEEN.iter().map(|[from, to]| (*from, *to)).collect();
    let mut functions = BTreeSet::new();
    let architecture = Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md");
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
        "a permit's way: files {} (keeper {}, store {}), functions {}, calls {}",
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

/// ARCHITECTURE.md names only files, folders, functions and types that there are: `keeper/core/exchange.rs` (`send`).
#[test]
fn the_map_names_what_there_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let map = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    // Without the picture.
    let map: String = map.split("```").step_by(2).collect();
    let (mut file, mut text, mut names) = ("", String::new(), 0);
    let mut is_within = false;
    for (index, part) in map.split('`').enumerate() {
        if index % 2 == 0 {
            // Between two names: a parenthesis begins after a file, and ends somewhere.
            is_within = match part.trim_start().chars().next() {
                Some('(') if part.trim() == "(" => true,
                _ => is_within && !part.contains(')'),
            };
        } else if part.contains('/') || part.ends_with(".rs") {
            let found = [root.join("src").join(part), root.join(part)];
            let found = found.iter().find(|path| path.exists());
            let path = found.unwrap_or_else(|| panic!("there is no `{part}`"));
            file = part;
            text = if path.is_file() {
                fs::read_to_string(path).unwrap()
            } else {
                String::new()
            };
        } else if is_within && !text.is_empty() {
            let name = part.rsplit("::").next().unwrap();
            let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
            assert!(words.any(|word| word == name), "`{file}` has no `{part}`");
            names += 1;
        }
    }
    assert!(names > 40, "only {names} names were found");
}

/// Files on a permit's way, and calls between their functions. They may only become fewer.
const MOST_FILES: usize = 14;
const MOST_CALLS: usize = 59;

#[test]
fn figures() {
    let all = Crate::read();
    let lines = |sources: &[&Source]| sources.iter().map(|source| source.lines).sum::<usize>();
    let whole: Vec<_> = all.sources.iter().collect();
    println!("files {}, lines {}", whole.len(), lines(&whole));
    let keeper = whole.iter().copied();
    let keeper: Vec<_> = keeper
        .filter(|source| source.name.starts_with("keeper/"))
        .collect();
    let restricted = keeper.iter().map(|source| source.restricted).sum::<usize>();
    let longest = keeper.iter().max_by_key(|source| source.lines).unwrap();
    println!(
        "keeper: files {}, lines {}, restricted {restricted}, longest {} {}",
        keeper.len(),
        lines(&keeper),
        longest.name,
        longest.lines
    );
    let longest = whole.iter().max_by_key(|source| source.lines).unwrap();
    println!("longest: {} {}", longest.name, longest.lines);
    // They may only become fewer.
    assert!(keeper.len() <= 26 && restricted <= MOST_RESTRICTED && longest.lines <= 550);
}

/// Items of the keeper that say how far they are seen: types, and methods that are seen less far than their type. See
/// `methods_of_the_keeper_say_less_than_their_type_or_nothing`.
const MOST_RESTRICTED: usize = 149;
