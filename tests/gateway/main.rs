//! Two processes of `examples/llm_gateway`, with the policy of its file, on a real Redis and in front of an upstream
//! controlled by the test: the view of a service owner. Also the example's parsers of requests and answers in
//! isolation, and `examples/grpc`, which ends on its own.

mod answers;
mod connections;
mod counts;
mod dialects;
#[path = "../../examples/llm_gateway/endpoint.rs"]
mod endpoint;
#[path = "../../examples/llm_gateway/estimate.rs"]
mod estimate;
mod estimates;
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
mod unreported;
mod upstream;
#[path = "../../examples/llm_gateway/usage.rs"]
mod usage;
