//! Dependencies between files: by imports, and within a folder by calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use crate::source::{Module, SOURCES, Source, sources};

/// Methods of the standard library with the names of some of our own methods.
const OF_STD: [&str; 23] = [
    "clone", "collect", "contains", "count", "default", "drop", "end", "entry", "find", "first",
    "get", "insert", "is_empty", "is_none", "len", "max", "new", "next", "poll", "push", "remove",
    "sleep", "take",
];

/// A crate and the dependencies of its files.
pub(crate) struct Crate {
    pub(crate) sources: Vec<Source>,
    by_module: BTreeMap<Module, usize>,
}

/// Dependencies, by the numbers of the files.
pub(crate) type Graph = BTreeMap<usize, BTreeSet<usize>>;

impl Crate {
    /// The library.
    pub(crate) fn read() -> &'static Self {
        &Self::read_all()[0]
    }

    /// The crates of [`SOURCES`], parsed once for all tests.
    pub(crate) fn read_all() -> &'static [Self] {
        static READ: LazyLock<Vec<Crate>> = LazyLock::new(|| {
            let each = SOURCES.iter();
            each.map(|(folder, first)| Crate::of(sources(folder, first)))
                .collect()
        });
        &READ
    }

    fn of(sources: Vec<Source>) -> Self {
        let by_module = sources.iter().enumerate();
        let by_module = by_module
            .map(|(number, source)| (source.module.clone(), number))
            .collect();
        Self { sources, by_module }
    }

    /// The file that defines the target of a path, as seen from a module.
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

    /// Like [`resolve`](Self::resolve), from this module downward.
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
        // An external crate, or a cycle of names.
        if depth > 8 {
            return None;
        }
        let whole: Vec<_> = passed_on.iter().chain(rest).cloned().collect();
        self.resolve(module, &whole, depth + 1)
    }

    /// The imports of each file, including items named by a path.
    pub(crate) fn imports(&self) -> Graph {
        let of = |(number, source): (usize, &Source)| {
            let paths = source.imports.values().chain(&source.paths);
            let others = paths.filter_map(|path| self.resolve(&source.module, path, 0));
            (number, others.filter(|other| *other != number).collect())
        };
        self.sources.iter().enumerate().map(of).collect()
    }

    /// Which files of a folder call functions of each other, by name. A file can call only functions next to it, or
    /// below its imports, so that methods of the same name are not confused.
    pub(crate) fn calls(&self, folder: &str, imports: &Graph) -> Graph {
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

    pub(crate) fn name(&self, number: usize) -> &str {
        &self.sources[number].name
    }
}

/// All files reachable from a file.
fn reach(graph: &Graph, from: usize) -> BTreeSet<usize> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(next) = open.pop() {
        let new = graph.get(&next).into_iter().flatten();
        open.extend(new.filter(|next| seen.insert(**next)));
    }
    seen
}

/// The sets of files that reach each other.
pub(crate) fn circles(graph: &Graph) -> Vec<Vec<usize>> {
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
