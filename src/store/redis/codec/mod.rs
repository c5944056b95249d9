//! An exchange as the script's arguments, and the script's reply as a [`Reply`](crate::ledger::Reply).
//!
//! `ledger/script/header.lua` describes both forms. `ledger/tests/twins.rs` tests them with the script in a real server,
//! and `fuzzing.rs` with whatever a store may answer.

mod decode;
mod encode;

pub(crate) use self::{
    decode::{decode, decode_wake},
    encode::encode,
};
