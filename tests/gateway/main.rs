//! Two processes of `examples/llm_gateway`, with the policy of its file, on a real Redis and before an upstream that
//! does what the test says: what a service owner would see. And `examples/grpc`, which ends by itself.

mod failures;
mod options;
mod policy;
mod proxy;
mod reload;
mod stage;
#[path = "../support/mod.rs"]
mod support;
mod upstream;
