//! Which files of the keeper write a field: those with an assignment to it, a `&mut` of it, or a call of a method on it
//! that changes a value of the standard library.
//!
//! A field whose type is of the keeper is written only by assignments: what such a type holds is in fields of its own. A
//! value is known by the type of a field, by `self`, or by a variable with the name of its type, such as `queue`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use syn::{
    Expr, ExprAssign, ExprBinary, ExprMethodCall, ExprReference, GenericArgument, ImplItemFn, Item,
    ItemImpl, ItemMod, ItemStruct, PathArguments, Type, Visibility,
    visit::{self, Visit},
};

use crate::source::{Source, is_test, repository};

/// Methods of the standard library, and of the project's collections, that change what they are called on; beside those
/// whose names end with `_mut`.
const CHANGING: [&str; 25] = [
    "append",
    "clear",
    "dedup",
    "drain",
    "entry",
    "extend",
    "get_or_insert",
    "get_or_insert_with",
    "insert",
    "next",
    "pop",
    "pop_back",
    "pop_first",
    "pop_front",
    "push",
    "push_back",
    "push_front",
    "remove",
    "replace",
    "retain",
    "sort",
    "sort_by_key",
    "split_off",
    "take",
    "truncate",
];

/// Variables that have not the name of their type.
const VARIABLES: [(&str, &str); 1] = [("ctx", "Context")];

#[derive(Default)]
pub(crate) struct Fields {
    /// The name of the type, if it is a path, of each field of each type.
    types: BTreeMap<String, BTreeMap<String, String>>,
    /// Types that have only private fields.
    closed: BTreeSet<String>,
    /// The files that write a field of a type.
    pub(crate) writers: BTreeMap<(String, String), BTreeSet<String>>,
    file: String,
    /// Of the current `impl`.
    of: Option<String>,
}

impl Fields {
    pub(crate) fn read(keeper: &[&Source]) -> Self {
        let parse = |source: &&Source| {
            let path = repository().join("src").join(&source.name);
            syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap()
        };
        let files: Vec<_> = keeper.iter().map(parse).collect();
        let mut fields = Self::default();
        for item in files.iter().flat_map(|file| &file.items) {
            match item {
                Item::Struct(item) if !is_test(&item.attrs) => fields.declare(item),
                _ => {}
            }
        }
        for (file, source) in files.iter().zip(keeper) {
            fields.file.clone_from(&source.name);
            fields.visit_file(file);
        }
        fields
    }

    /// Number of fields of a type.
    pub(crate) fn of(&self, name: &str) -> usize {
        self.types.get(name).map_or(0, BTreeMap::len)
    }

    /// Whether a type has fields, and all are private.
    pub(crate) fn is_closed(&self, name: &str) -> bool {
        self.closed.contains(name)
    }

    fn declare(&mut self, item: &ItemStruct) {
        let mut fields = BTreeMap::new();
        for (number, field) in item.fields.iter().enumerate() {
            let name = field.ident.as_ref();
            let name = name.map_or(number.to_string(), ToString::to_string);
            fields.insert(name, name_of(&field.ty).unwrap_or_default());
        }
        let mut all = item.fields.iter();
        let is_closed = all.all(|field| matches!(field.vis, Visibility::Inherited));
        if is_closed && !fields.is_empty() {
            self.closed.insert(item.ident.to_string());
        }
        self.types.insert(item.ident.to_string(), fields);
    }

    /// The type of a value.
    fn type_of(&self, value: &Expr) -> Option<&str> {
        match value {
            Expr::Path(path) => {
                let name = path.path.get_ident()?.to_string();
                if name == "self" {
                    return self.of.as_deref();
                }
                let known = VARIABLES.iter().find(|(variable, _)| *variable == name);
                let is_named = |of: &&String| snake(of) == name;
                match known {
                    Some((_, of)) => Some(of),
                    None => self.types.keys().find(is_named).map(String::as_str),
                }
            }
            Expr::Field(field) => {
                let (of, name) = self.field(field)?;
                let inner = self.types.get(&of)?.get(&name)?;
                self.types.contains_key(inner).then_some(inner)
            }
            Expr::Paren(inner) => self.type_of(&inner.expr),
            Expr::Unary(inner) => self.type_of(&inner.expr),
            _ => None,
        }
    }

    fn field(&self, field: &syn::ExprField) -> Option<(String, String)> {
        let of = self.type_of(&field.base)?.to_owned();
        let name = match &field.member {
            syn::Member::Named(name) => name.to_string(),
            syn::Member::Unnamed(number) => number.index.to_string(),
        };
        Some((of, name))
    }

    /// Notes that this place is written.
    fn note(&mut self, place: &Expr, is_assigned: bool) {
        match place {
            Expr::Field(field) => {
                let Some((of, name)) = self.field(field) else {
                    // A field of a value in a field, of a type that is not known.
                    return self.note(&field.base, is_assigned);
                };
                let Some(inner) = self.types.get(&of).and_then(|fields| fields.get(&name)) else {
                    return;
                };
                if is_assigned || !self.types.contains_key(inner) {
                    let writers = self.writers.entry((of, name)).or_default();
                    writers.insert(self.file.clone());
                }
            }
            Expr::Index(inner) => self.note(&inner.expr, is_assigned),
            Expr::Paren(inner) => self.note(&inner.expr, is_assigned),
            Expr::Unary(inner) => self.note(&inner.expr, is_assigned),
            Expr::Tuple(places) => {
                for place in &places.elems {
                    self.note(place, is_assigned);
                }
            }
            _ => {}
        }
    }
}

/// The name of a type, without its path and without a box.
fn name_of(of: &Type) -> Option<String> {
    let Type::Path(path) = of else {
        return None;
    };
    let last = path.path.segments.last()?;
    match &last.arguments {
        PathArguments::AngleBracketed(inner) if last.ident == "Box" => match inner.args.first() {
            Some(GenericArgument::Type(of)) => name_of(of),
            _ => None,
        },
        PathArguments::None => Some(last.ident.to_string()),
        _ => None,
    }
}

/// A name in the case of variables.
fn snake(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

impl<'a> Visit<'a> for Fields {
    fn visit_item_impl(&mut self, block: &'a ItemImpl) {
        if !is_test(&block.attrs) {
            self.of = name_of(&block.self_ty);
            visit::visit_item_impl(self, block);
            self.of = None;
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_expr_assign(&mut self, assign: &'a ExprAssign) {
        self.note(&assign.left, true);
        visit::visit_expr_assign(self, assign);
    }

    fn visit_expr_binary(&mut self, binary: &'a ExprBinary) {
        use syn::BinOp::{
            AddAssign, BitAndAssign, BitOrAssign, BitXorAssign, DivAssign, MulAssign, RemAssign,
            ShlAssign, ShrAssign, SubAssign,
        };
        if let AddAssign(_) | BitAndAssign(_) | BitOrAssign(_) | BitXorAssign(_) | DivAssign(_)
        | MulAssign(_) | RemAssign(_) | ShlAssign(_) | ShrAssign(_) | SubAssign(_) = binary.op
        {
            self.note(&binary.left, true);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_reference(&mut self, reference: &'a ExprReference) {
        if reference.mutability.is_some() {
            self.note(&reference.expr, false);
        }
        visit::visit_expr_reference(self, reference);
    }

    fn visit_expr_method_call(&mut self, call: &'a ExprMethodCall) {
        let method = call.method.to_string();
        if method.ends_with("_mut") || CHANGING.contains(&&*method) {
            self.note(&call.receiver, false);
        }
        visit::visit_expr_method_call(self, call);
    }
}
