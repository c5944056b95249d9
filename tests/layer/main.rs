//! The layer, by what can end a response and what can go wrong on the way. Nothing here sleeps: tests wait for events.

mod logs;
mod lost;
mod refusals;
mod releases;
mod scopes;
mod servers;
mod slots;
mod stacks;
mod support;
mod transparency;
