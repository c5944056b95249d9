//! The tokens of a request by their kinds. Decides what they cost in units of the budget.
//!
//! Tests: `tests/gateway/prices.rs`.

use std::str::FromStr;

use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Tokens {
    /// Of the prompt, without those in `cached`.
    pub(crate) input: u64,
    /// Of the prompt, which the upstream has read from its cache.
    pub(crate) cached: u64,
    pub(crate) output: u64,
}

/// Thousandths of a unit for a token of each kind. Written in units, as `input=1,cached=0.1,output=4`. Default: a unit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weights([u32; 3]);

const KINDS: [&str; 3] = ["input", "cached", "output"];

impl Weights {
    /// Returns the cost in units, rounded up.
    pub(crate) fn cost(self, tokens: Tokens) -> u32 {
        let tokens = [tokens.input, tokens.cached, tokens.output];
        let costs = tokens.into_iter().zip(self.0);
        let cost: u128 = costs
            .map(|(tokens, weight)| u128::from(tokens) * u128::from(weight))
            .sum();
        u32::try_from(cost.div_ceil(1_000)).unwrap_or(u32::MAX)
    }
}

impl FromStr for Weights {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut weights = [1_000; 3];
        for part in text.split(',') {
            let (name, weight) = part.split_once('=').unwrap_or((part, ""));
            let kind = KINDS.iter().position(|kind| *kind == name);
            let kind = kind.ok_or_else(|| format!("`{name}` is none of {}", KINDS.join(", ")))?;
            let weight = weight
                .parse::<f64>()
                .map_or(-1.0, |weight| weight * 1_000.0);
            // A prompt that costs nothing would be admitted whatever the budget.
            let least = if name == "input" { 1.0 } else { 0.0 };
            if !(least..=1e6).contains(&weight) || (weight - weight.round()).abs() > 1e-6 {
                return Err(format!(
                    "{name}: it must be {} to 1000, by steps of 0.001",
                    least / 1e3
                ));
            }
            weights[kind] = weight.round() as u32;
        }
        Ok(Self(weights))
    }
}
