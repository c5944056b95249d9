//! The results, with the targets beside them.

use std::time::Duration;

use crate::{
    Plan,
    gauge::Load,
    neighbour::Waits,
    replica::{Held, Look},
};

fn line(what: &str, figure: &str, target: &str) {
    println!("  {what:<52}{figure:>24}  {target}");
}

pub(crate) fn renewals(load: &Load, seconds: f64, shortest_rest: Duration) {
    let of_a_core = |us: f64| format!("{:.2} %", us / seconds / 1e4);
    let rest = format!("{:.1} s", shortest_rest.as_secs_f64());
    line("least that was left of a lease", &rest, "never 0");
    line(
        "Redis, of a core: the script",
        &of_a_core(load.commands_us),
        "at most 2 %",
    );
    line("  its process in all", &of_a_core(load.processor_us), "");
    line(
        "script calls a second",
        &format!("{:.0}", load.calls / seconds),
        "",
    );
    line(
        "  each of them",
        &format!("{:.0} us", load.commands_us / load.calls),
        "",
    );
}

pub(crate) fn memory(store_bytes: f64, held: &[Held; 2]) {
    let mean = |of: fn(&Held) -> f64| held.iter().map(of).sum::<f64>() / 2.0;
    let bytes = |bytes: f64| format!("{bytes:.0} bytes");
    line("a holder in Redis", &bytes(store_bytes), "at most 130");
    line(
        "a holder in its process, resident",
        &bytes(mean(|held| held.resident)),
        "at most 1024",
    );
    line(
        "  allocated for the limit",
        &bytes(mean(|held| held.allocated - held.bare)),
        "",
    );
    line(
        "  allocated for the stream itself",
        &bytes(mean(|held| held.bare)),
        "",
    );
}

/// The work of the processes meanwhile. Each timer is in a task, and wakes a thread.
pub(crate) fn processes(held: &[Held; 2], before: &[Look; 2], after: &[Look; 2], seconds: f64) {
    let each = |of: fn(&Look) -> f64| {
        let of_all = |looks: &[Look; 2]| looks.iter().map(of).sum::<f64>();
        (of_all(after) - of_all(before)) / 2.0 / seconds
    };
    let processor = format!("{:.2} %", 100.0 * each(|look| look.processor_s));
    line("each process, of a core", &processor, "");
    let tasks = format!("{} and {}", held[0].tasks[0], held[0].tasks[1]);
    line(
        "  its tasks before and after",
        &tasks,
        "no more for streams",
    );
    let rests = format!("{:.0}", each(|look| look.rests as f64));
    line(
        "  its threads wake up, times a second",
        &rests,
        "no more for streams",
    );
}

pub(crate) fn kill(back: Option<Duration>, free: usize, plan: Plan) {
    let within = format!("within {:?}", plan.lease);
    let back = back.map_or("later".to_owned(), |back| {
        format!("{:.1} s", back.as_secs_f64())
    });
    line(
        "one killed: all its leases have ended after",
        &back,
        &within,
    );
    let all = plan.layout.free_after_kill(plan.streams);
    line(
        "  slots that others could take then",
        &free.to_string(),
        &format!("all {all}"),
    );
}

/// The third client's waits for slots.
pub(crate) fn waits(watches: &[(&str, [Waits; 2], f64)]) {
    println!(
        "  a third client's request: ms                      median      99 %   99.9 %  longest    requests"
    );
    for (when, waits, longest_call_ms) in watches {
        for (waits, key) in waits.iter().zip(["its own key", "the same key"]) {
            let [median, most, nearly_all, longest] =
                [0.5, 0.99, 0.999, 1.0].map(|part| waits.at(part));
            let count = waits.count();
            println!(
                "    {:<46}{median:>8.2}{most:>10.2}{nearly_all:>9.2}{longest:>9.2}{count:>12}",
                format!("{when}, {key}")
            );
        }
        println!("      longest call of the script {longest_call_ms:.2} ms");
    }
}
