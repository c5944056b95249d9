//! Two processes of the gateway, with the policy of its file, on a real Redis and in front of an upstream controlled by the
//! test: the view of a service owner. Also the gateway's parsers of requests and answers in isolation.

mod access;
mod answers;
mod authentication;
#[path = "../../src/callers.rs"]
mod callers;
mod connections;
mod counts;
mod dialects;
#[path = "../../src/endpoint.rs"]
mod endpoint;
#[path = "../../src/estimate.rs"]
mod estimate;
mod estimates;
mod events;
mod failures;
#[path = "../../src/json.rs"]
mod json;
mod options;
#[path = "../../src/path.rs"]
mod path;
mod paths;
mod policy;
mod prices;
#[path = "../../src/prompt.rs"]
mod prompt;
mod prompts;
mod providers;
mod proxy;
mod reload;
mod scans;
mod sdks;
#[path = "../../src/sse.rs"]
mod sse;
mod stage;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../../src/time.rs"]
mod time;
mod times;
mod tokens;
mod unreported;
mod upstream;
#[path = "../../src/usage.rs"]
mod usage;
#[path = "../../src/weights.rs"]
mod weights;
