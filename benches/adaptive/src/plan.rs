//! What an upstream does over time, and what its clients ask for: the arguments that all processes of a case share.

use std::{collections::HashMap, time::Duration};

#[derive(Clone, Debug)]
pub struct Plan {
    /// Seconds, and the capacity in them; 0: the upstream is down.
    phases: Vec<(f64, f64)>,
    /// Time to the head of a response of an idle upstream that refuses nobody.
    pub time_to_head: Option<Duration>,
    /// A later head is an overload.
    pub target: Duration,
    pub refused_at_random: f64,
    /// Streams of 1 to 600 s (log-uniform), or of 1 s on average (exponential).
    pub is_long: bool,
    /// How many times faster than this the streams are.
    pub faster: f64,
    /// For how many seconds only a tenth of the clients call.
    pub quiet: f64,
}

impl Plan {
    /// Reads arguments such as `phases=120:200,120:70`.
    pub fn parse(arguments: &[String]) -> Self {
        let given: HashMap<&str, &str> = arguments
            .iter()
            .filter_map(|one| one.split_once('='))
            .collect();
        let number = |name: &str, default: f64| {
            given
                .get(name)
                .map_or(default, |text| text.parse().expect(name))
        };
        let phases = given["phases"].split(',').map(|phase| {
            let (seconds, capacity) = phase.split_once(':').expect("seconds:capacity");
            (
                seconds.parse().expect("seconds"),
                capacity.parse().expect("capacity"),
            )
        });
        let seconds =
            |name| Some(Duration::from_secs_f64(number(name, 0.0))).filter(|time| !time.is_zero());
        Self {
            phases: phases.collect(),
            time_to_head: seconds("head"),
            target: seconds("target").unwrap_or(Duration::MAX),
            refused_at_random: number("random", 0.0),
            is_long: number("long", 0.0) > 0.0,
            faster: number("faster", 1.0),
            quiet: number("quiet", 0.0),
        }
    }

    pub fn length(&self) -> Duration {
        Duration::from_secs_f64(self.phases.iter().map(|(seconds, _)| seconds).sum())
    }

    pub fn capacity(&self, at: Duration) -> f64 {
        let mut left = at.as_secs_f64();
        for (seconds, capacity) in &self.phases {
            if left < *seconds {
                return *capacity;
            }
            left -= seconds;
        }
        self.phases.last().map_or(0.0, |(_, capacity)| *capacity)
    }

    /// The length of a stream, in seconds.
    pub fn draw(&self) -> f64 {
        let uniform = 1.0 - fastrand::f64();
        let length = if self.is_long {
            600_f64.powf(uniform)
        } else {
            -uniform.ln()
        };
        length / self.faster
    }
}
