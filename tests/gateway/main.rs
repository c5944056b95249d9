//! Two processes of `examples/llm_gateway`, with the policy of its file, on a real Redis and before an upstream that
//! does what the test says: what a service owner would see. The parts of the example that read requests and answers, by
//! themselves. And `examples/grpc`, which ends by itself.

mod answers;
mod counts;
mod dialects;
#[path = "../../examples/llm_gateway/endpoint.rs"]
mod endpoint;
mod events;
mod failures;
#[path = "../../examples/llm_gateway/json.rs"]
mod json;
mod options;
#[path = "../../examples/llm_gateway/path.rs"]
mod path;
mod paths;
mod policy;
#[path = "../../examples/llm_gateway/prompt.rs"]
mod prompt;
mod prompts;
mod providers;
mod proxy;
mod reload;
mod scans;
mod sdks;
#[path = "../../examples/llm_gateway/sse.rs"]
mod sse;
mod stage;
#[path = "../support/mod.rs"]
mod support;
mod tokens;
mod upstream;
#[path = "../../examples/llm_gateway/usage.rs"]
mod usage;
