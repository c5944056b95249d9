//! The server's processor time.

use crate::redis_server::RedisServer;

/// Processor time of the server, in microseconds.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cost {
    /// Time in commands.
    pub(crate) commands_us: f64,
    /// Total time: commands, protocol, sockets.
    pub(crate) processor_us: f64,
}

impl Cost {
    /// Reads the cost of these commands. Commands called by a script count with the script.
    pub(crate) fn read(server: &RedisServer, commands: &[&str]) -> Self {
        let number = |text: &str| text.parse::<f64>().expect("a number");
        let stats = server.cli(&["INFO", "commandstats"]);
        let usec_of = |command: &&str| {
            let prefix = format!("cmdstat_{command}:");
            let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
            let usec = line.and_then(|line| {
                line.split(',')
                    .find_map(|field| field.strip_prefix("usec="))
            });
            usec.map_or(0.0, number)
        };
        let processor = server.cli(&["INFO", "cpu"]);
        let seconds = |name: &str| {
            let mut lines = processor.lines();
            lines
                .find_map(|line| line.strip_prefix(name))
                .map_or(0.0, number)
        };
        Self {
            commands_us: commands.iter().map(usec_of).sum(),
            processor_us: 1e6 * (seconds("used_cpu_user:") + seconds("used_cpu_sys:")),
        }
    }

    pub(crate) fn add(&mut self, before: Self, after: Self) {
        self.commands_us += after.commands_us - before.commands_us;
        self.processor_us += after.processor_us - before.processor_us;
    }
}
