//! The files of each package, and what each defines, imports, calls and exposes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, Expr, ExprMethodCall, File, ImplItem, Item, TraitItem, UseTree, Visibility,
    visit::{self, Visit},
};

/// Folders of source, and the root of each: the library is first.
pub(crate) const SOURCES: &[(&str, &str)] = &[
    ("src", "lib.rs"),
    ("gateway/src", "main.rs"),
    ("operators/src", "lib.rs"),
];

pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A path of modules from the root of the crate.
pub(crate) type Module = Vec<String>;

/// A file of a package, excluding tests.
#[derive(Default)]
pub(crate) struct Source {
    /// Path below its folder of source.
    pub(crate) name: String,
    pub(crate) module: Module,
    /// Items defined and modules declared.
    pub(crate) defines: BTreeSet<String>,
    /// Names that stand for paths: by `use`, including re-exports.
    pub(crate) imports: BTreeMap<String, Vec<String>>,
    /// Functions and methods defined.
    pub(crate) functions: BTreeSet<String>,
    /// Paths written out.
    pub(crate) paths: BTreeSet<Vec<String>>,
    /// Methods called, and functions called by a path of one segment.
    pub(crate) calls: BTreeSet<String>,
    /// `pub(super)`, `pub(crate)` and the like.
    pub(crate) restricted: usize,
    /// Types defined, and their visibility.
    pub(crate) types: BTreeMap<String, Module>,
    /// Methods and fields by the name of their type, with their visibility unless they are `pub`.
    pub(crate) members: Vec<(String, String, Option<Module>)>,
    /// Items visible everywhere, in a file with less visibility.
    pub(crate) open_items: Vec<String>,
}

pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
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

/// All files of a crate without its tests, from this one on.
pub(crate) fn sources(folder: &str, first: &str) -> Vec<Source> {
    let root = repository().join(folder);
    let mut sources = Vec::new();
    let mut open = vec![(root.join(first), root.clone(), Module::new())];
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
        let mut source = Source {
            name,
            module,
            ..Source::default()
        };
        source.read(&file);
        sources.push(source);
    }
    sources.sort_by(|one, other| one.name.cmp(&other.name));
    sources
}

/// The file of a module, and the folder of the modules that it declares.
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
    if file.exists() {
        (file, inner)
    } else {
        (inner.join("mod.rs"), inner)
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
            // Items made by a macro, such as `pin_project!`.
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
            // Methods of a trait are found in the trait's own file.
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

    /// Records the visibility of items, and of their methods and fields.
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

    /// The module in which the item is visible; `None` if everywhere.
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
        if item == "self" {
            let name = whole.last().cloned().unwrap_or_default();
            self.imports.insert(name, whole);
        } else {
            whole.push(item.to_string());
            self.imports.insert(name, whole);
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
        // Arguments of `matches!`, `tracing::warn!` and the like, if they are expressions.
        let parser = syn::punctuated::Punctuated::<Expr, syn::Token![,]>::parse_terminated;
        if let Ok(arguments) = made.parse_body_with(parser) {
            for argument in &arguments {
                // The expressions live only during this visit.
                let mut inner = Self::default();
                inner.visit_expr(argument);
                self.paths.append(&mut inner.paths);
                self.calls.append(&mut inner.calls);
            }
        }
    }
}
