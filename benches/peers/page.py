"""Writes `benches/COMPARISON.md` and its charts from the results of a run. All figures in the text come from there."""

import itertools
import os
import shutil
import statistics
import textwrap

import charts
from cases import BURST, CASES, CONNECTIONS, FAULT_LOADS, FAULTS, GOAL_MS, LIMIT, OUTAGES, PROCESSES, RATE, TRACE_FASTER, TRACE_LIMIT, TRACE_PROCESSES, WORKERS
from charts import short
from systems import NOT_RUN, RATES, SLOTS

LINE = 130
NEAR = 1.1  # within 10 % of the first
FAULT_NAMES = {"kill": "a holder is killed by -9", "freeze": "Redis is frozen", "restart": "Redis is restarted without its data"}


def runs_text(counts):
    """How often the systems were run, by case."""
    numbers = {count for found in counts.values() for count in found}
    if numbers <= {1}:
        return "One run."
    spread = "medians, and in brackets the least and the most"
    if len(numbers) == 1:
        return f"{max(numbers)} runs: {spread}."
    each = "; ".join(f"{case} {' or '.join(map(str, sorted(set(found))))}" for case, found in counts.items())
    return f"Runs of each system: {each}. Of several runs the figures are {spread}."


class Spread:
    """A figure of all repetitions: the median, and the least and most."""

    def __init__(self, values):
        self.values = [value for value in values if value is not None]

    def __bool__(self):
        return bool(self.values)

    @property
    def middle(self):
        return statistics.median(self.values)

    def __str__(self):
        if not self:
            return "-"
        low, high = short(min(self.values)), short(max(self.values))
        return short(self.middle) + (f" ({low} to {high})" if low != high else "")

    def overlaps(self, other):
        return min(self.values) <= max(other.values) and min(other.values) <= max(self.values)


def dig(one, *path):
    for step in path:
        one = one.get(step) if isinstance(one, dict) else None
    return one


def figure(rows, *path):
    return Spread([dig(row, *path) for row in rows])


class Page:
    def __init__(self, results, folder):
        self.results, self.meta = results, results["meta"]
        self.folder = folder
        self.text, self.ranks = [], []
        charts_folder = os.path.join(folder, "comparison")
        shutil.rmtree(charts_folder, ignore_errors=True)  # with charts of cases that are not in this run
        os.makedirs(charts_folder)

    def write(self):
        # The ranking is at the top, and needs the figures of all cases.
        for part in (self.standard, self.faults, self.rates, self.distance, self.growth, self.service, self.trace):
            part()
        body, self.text = self.text, []
        self.introduction()
        self.ranking()
        self.text += body
        self.notes()
        with open(os.path.join(self.folder, "COMPARISON.md"), "w") as file:
            file.write("\n".join(self.text).rstrip() + "\n")

    def say(self, *lines):
        """A paragraph, wrapped, or lines as they are: headings, tables, lists, pictures."""
        for line in lines:
            self.text += [line] if line[:1] in "|#!-" else textwrap.wrap(line, LINE, break_on_hyphens=False, break_long_words=False)
        self.text.append("")

    def table(self, head, rows):
        lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        self.say(*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows))

    def chart(self, name, drawing, words):
        with open(os.path.join(self.folder, "comparison", name + ".svg"), "w") as file:
            file.write(drawing)
        self.say(f"![{words}](comparison/{name}.svg)")

    def of(self, case, systems):
        """The repetitions of each system that took part."""
        there = self.results.get(case, {})
        return [(system, there[system.name]) for system in systems if there.get(system.name)]

    def rank(self, group, words, entries, higher=False, edge=None):
        """Notes who is first. `entries`: system, figure, and whether it may be first. `edge`: where reasons are not those of the group."""
        entries = [entry for entry in entries if entry[1]]
        able = sorted((entry for entry in entries if entry[2]), key=lambda entry: entry[1].middle, reverse=higher)
        ours = next((entry for entry in entries if entry[0].name == "tower-turnstile"), None)
        if able and ours and len(entries) > 1:
            self.ranks.append((group, words, able, ours, edge or group))

    # The parts of the page.

    def introduction(self):
        meta = self.meta
        self.say("# Comparison under load")
        runs = runs_text({case: [len(reps) for reps in found.values()] for case in CASES if (found := self.results.get(case))})
        self.say(
            "Other semaphores and rate limiters beside tower-turnstile, under the same load, with their recommended settings. "
            f"Made by `.ci/peers` (the options are [below](#commands)) on {meta['date']}: {meta['machine']}. Every system has a redis-server of its own for each "
            f"case ({meta['redis']}), and nothing else is tuned. Systems run one after the other, except in cases that leave the processors "
            "idle (holds of 5 s, faults, the trace), where up to four run at once, up to two of those that poll, and one that takes the processors. "
            f"{runs} {meta['remark']} [comparison.md](../src/guide/comparison.md) lists the features of most of these systems; this page measures them."
        )
        if meta["quick"]:
            self.say("**A quick look, to see that everything works: too short for conclusions.**")
        late = Spread([
            row["lateness_p99"] for reps in self.results.get("standard", {}).values() for rep in reps for row in rep.values()
        ])
        self.say(
            "**The load does not wait.** Requests start by a Poisson clock, however many are still waiting, and a wait counts from the "
            "moment at which its request was due. One driver makes the load for all systems, and tells each process, whatever its language, by a "
            "line on its stdin when to acquire and when to release; times are the process's own, by the clock that all share."
            + (f" The driver itself was late by {short(late.middle)} ms (99 %, median of all runs), which every wait includes." if late else "")
        )
        self.say(
            "**Correctness is counted in the same run**, by the driver, which is part of no system: a slot is in use from the moment a "
            "process reports its grant until just before it calls the release (or is informed of its loss, or is killed). "
            "*Peak* is the largest number in use at once. *Overtaken* is the share of grants that passed over a request that was made at least 10 ms "
            "earlier and granted at least 5 ms later. *Idle* is the share of slot time that lay idle while a request waited. *Left* is the number of slots that can be acquired after the load: fewer "
            "than the limit means lost slots, more means a broken cap. A system that breaks the cap, loses slots or fails requests without a fault is marked with ‡ and never ranked first."
        )

    def ranking(self):
        self.say("## Ranking")
        self.say(
            "One row for each figure, in the units of the tables below; lower is better, except for pairs a second. *First* is the best sound system, with the range "
            "of its runs in brackets; the next column has systems whose ranges overlap with it. If tower-turnstile is in neither, the row has its figure, the ratio to "
            "the first, and the reason."
        )
        rows, goals = [], {}
        for group, words, able, ours, edge in self.ranks:
            first = able[0]
            same = [entry for entry in able[1:] if entry[1].overlaps(first[1])]
            is_first = any(entry[0].is_ours for entry in [first, *same])
            ratio = ours[1].middle / first[1].middle if first[1].middle else None
            near = is_first or bool(ratio) and 1 / NEAR <= ratio <= NEAR
            goals.setdefault(group, []).append((words, is_first, near))
            is_plain = ours[0] in [entry[0] for entry in [first, *same]]
            reason = "" if is_plain else first[0].edge.get(edge, "its figures are below")
            names = "; ".join(entry[0].name for entry in same[:3]) + (f"; {len(same) - 3} more" if len(same) > 3 else "")
            here = "first" if is_plain else f"{ours[1]}" + (f", {times(ratio)}" if ratio else "")
            rows.append([words, f"**{first[0].name}** {first[1]}", names, here, reason])
        self.table(["", "first", "no different within the spread", "tower-turnstile", "why another is first"], rows)
        lines = []
        for group, found in goals.items():
            reached = sum(first if group in STRICT else near for _, first, near in found)
            want = "first" if group in STRICT else "first, or within 10 % of the first"
            missed = [words for words, first, near in found if not (first if group in STRICT else near)]
            lines.append(f"- {group}: {want} in {reached} of {len(found)} rows" + (f"; not in: {'; '.join(missed)}" if missed else "") + ".")
        self.say("Goals in this run:", "", *lines, *self.goals_of_distance())

    def goals_of_distance(self):
        lines = []
        for key, row in self.ours("distance"):
            trip, alone, many = (figure(row, key, *path) for path in (("trip",), ("alone", "p50"), ("many", "rate")))
            if alone:
                lines.append(f"- Distance: {key}: a pair alone takes {alone.middle / trip.middle:.2f} round trips (goal: 1.1 at most).")
            if many:
                allowed = 1_000 * row[0][key]["tasks"] / trip.middle
                lines.append(f"- Distance: {key}: {short(many.middle)} pairs a second, {many.middle / allowed:.0%} of what the distance allows {row[0][key]['tasks']} tasks (goal: 90 %, unless the processors are the bottleneck).")
        return lines

    def ours(self, case):
        rows = self.results.get(case, {}).get("tower-turnstile", [])
        return [(key, rows) for key in (rows[0] if rows else {})]

    def standard(self):
        long = self.results.get("long", {})
        entries = [
            (system, [one | more for one, more in itertools.zip_longest(reps, long.get(system.name, []), fillvalue={})])
            for system, reps in self.of("standard", SLOTS)
        ]
        if not entries:
            return
        loads = list(entries[0][1][0])
        self.say("## The standard case")
        self.say(f"{WORKERS} workers in {PROCESSES} processes want {LIMIT} slots, by a Poisson clock at a share of what the slots can hold.")
        sound = {system.name: is_sound(system, rows, loads) for system, rows in entries}
        for load in loads:
            there = [entry for entry in entries if figure(entry[1], load, "wait", "p99")]
            order = sorted(there, key=lambda entry: figure(entry[1], load, "wait", "p99").middle)
            rows = []
            for system, reps in order:
                get = lambda *path: figure(reps, load, *path)
                left = "-" if system.store == "none" else get("left")
                rows.append([
                    mark(system, sound), *(get("wait", part) for part in ("p50", "p90", "p99", "p99.9", "longest")),
                    get("handover", "p50"), get("handover", "p99"), get("inversions"), get("idle"), get("peak"), left, get("failed"), get("unserved"),
                ])
            self.say(f"### Slots wanted: {load}")
            self.say("Milliseconds; overtaken and idle in percent.")
            self.table(["", "wait p50", "p90", "p99", "p99.9", "longest", "handover p50", "p99", "overtaken", "idle", "peak", "left", "failed", "unserved"], rows)
            drawn = [(system.name, system.is_ours, {part: figure(reps, load, "wait", part).middle for part, _ in charts.MARKS}) for system, reps in order]
            name = "wait-" + "".join(letter if letter.isalnum() else "-" for letter in load)
            self.chart(name, charts.spreads(f"Wait for one of {LIMIT} slots, {load}", "milliseconds from the moment the request was due", drawn), f"Waits at {load}")
            able = lambda *path: [(system, figure(reps, load, *path), sound[system.name]) for system, reps in there]
            shared = lambda *path: [entry for entry in able(*path) if entry[0].store != "none"]
            for part in ("p50", "p99"):
                self.rank("Waits", f"wait {part}, {load}", shared("wait", part))
            self.rank("Fairness", f"overtaken, {load}", shared("inversions"))
            self.rank("Idle slots", f"idle, {load}", shared("idle"))
            over = [(system, figure(reps, load, "over_slot_s"), True) for system, reps in there]
            self.rank("Overshoot", f"slot seconds over the limit, {load}", over)
            self.rank("Waits", f"handover p50, {load}", shared("handover", "p50"))
        costed = [load for load in loads if figure(entries[0][1], load, "cost", "processor_us")]
        load = costed[min(1, len(costed) - 1)]
        self.say(f"### Cost of a pair, {load}")
        self.say("Commands that clients send (a script is one), and their time in the server; the time of the server's whole process; bytes in and out; the time of the clients' processes.")
        order = sorted(entries, key=lambda entry: figure(entry[1], load, "cost", "processor_us").middle)
        rows = [[mark(system, sound), *(figure(reps, load, "cost", key) for key in ("commands", "us", "processor_us", "bytes", "clients_us"))] for system, reps in order]
        self.table(["", "commands", "their us", "server us", "bytes", "clients us"], rows)
        for key, words in (("commands", "commands of a pair"), ("processor_us", "server time of a pair"), ("bytes", "bytes of a pair")):
            found = [(system, figure(reps, load, "cost", key), sound[system.name]) for system, reps in entries if system.store == "redis"]
            self.rank("Cost", f"{words}, {load}", found)

    def faults(self):
        entries = self.of("faults", SLOTS)
        if not entries:
            return
        meta = self.meta["lengths"]["faults"]
        self.say("## Faults")
        self.say(
            f"The standard case, holds of half a second, leases of {meta['lease_ms'] / 1000:g} s. *Normal again*: seconds from the fault until the end of the last "
            "second in which a tenth of the requests failed or were late (by more than 250 ms, and more than twice the 99th percentile before the fault). *Unreleased*: releases that failed (their slots come back when the lease ends, if there is one). *Informed*: holders that learned of a lost slot while they held it."
        )
        for fault in FAULTS:
            there = [(system, rows) for system, rows in entries if fault in rows[0]]
            order = sorted(there, key=lambda entry: figure(entry[1], fault, "until_normal").middle)
            name = FAULT_NAMES[fault] + (f" for {meta['frozen']:g} s" if fault == "freeze" else "")
            self.say(f"### {name[0].upper()}{name[1:]}, at {100 * FAULT_LOADS[fault]:g} % of the capacity")
            rows = []
            for system, reps in order:
                get = lambda *path: figure(reps, fault, *path)
                left = "-" if system.store == "none" else get("left")
                normal = get("until_normal")
                shown = normal if normal.middle < meta["after"] else f"not within {meta['after']:g}"
                rows.append([system.name, shown, get("wait", "p50"), get("wait", "p99"), get("peak"), get("over_slot_s"), get("idle"), left, get("failed"), get("unserved"), get("unreleased"), get("informed")])
            self.table(["", "normal again, s", "wait p50, ms", "p99", "peak", "slot seconds over the limit", "idle, %", "left", "failed", "unserved", "unreleased", "informed"], rows)
            drawn = [(system.name, system.is_ours, rows[0][fault]["timeline"]) for system, rows in order]
            self.chart(f"fault-{fault}", charts.timelines(name[0].upper() + name[1:], drawn, LIMIT, meta["before"], order[0][1][0][fault]["frozen"] if order else 0), name)
            keeps = lambda system, reps: all(rep[fault]["left"] == LIMIT and (system.store == "none" or rep[fault]["unserved"] == 0) for rep in reps)
            found = [(system, figure(reps, fault, "until_normal"), keeps(system, reps)) for system, reps in there if system.store != "none"]
            edge = "Outages" if fault in OUTAGES else None
            self.rank("Faults", f"normal again after: {name}", found, edge=edge)
            self.rank("Faults", f"over the limit, slot seconds: {name}", [(system, figure(reps, fault, "over_slot_s"), keeps(system, reps)) for system, reps in there if system.store != "none"], edge=edge)

    def rates(self):
        entries = self.of("rates", RATES)
        if not entries:
            return
        seconds = self.meta["lengths"]["rates"]["seconds"]
        self.say("## Rates")
        self.say(f"{PROCESSES} processes ask for {2 * RATE:,} a second of a rate of {RATE:,} a second with a burst of {BURST} where one can be chosen, for {seconds} s. *Worst second*: the most that were admitted within any one second.")
        order = sorted(entries, key=lambda entry: abs(figure(entry[1], "worst_second").middle - RATE))
        rows = []
        for system, reps in order:
            share = Spread([100 * rep["admitted"] / rep["budget"] for rep in reps])
            get = lambda *path: figure(reps, *path)
            rows.append([system.name, share, get("worst_second"), *(get("latency", part) for part in ("p50", "p99", "p99.9", "longest")), get("cost", "commands"), get("cost", "processor_us"), get("cost", "bytes"), get("failed")])
        self.table(["", "admitted, % of the budget", "worst second", "answer p50, ms", "p99", "p99.9", "longest", "commands", "server us", "bytes", "failed"], rows)
        self.chart("rates", charts.bars("The most admitted in a second", f"allowed: {RATE:,}, the line", [(system.name, system.is_ours, figure(reps, "worst_second").middle) for system, reps in order], RATE), "Admitted in the worst second")
        # One that admits less than nine tenths of what it may, or more, is not first.
        able = lambda reps: all(0.9 <= rep["admitted"] / (rep["budget"] + BURST) <= 1 and not rep["failed"] for rep in reps)
        shared = [(system, reps) for system, reps in entries if system.store != "none"]
        self.rank("Rates", "worst second", [(system, figure(reps, "worst_second"), able(reps)) for system, reps in shared])
        self.rank("Rates", "answer p99", [(system, figure(reps, "latency", "p99"), able(reps)) for system, reps in shared])
        self.rank("Rates", "server time of an answer", [(system, figure(reps, "cost", "processor_us"), able(reps)) for system, reps in shared])

    def distance(self):
        entries = self.of("distance", SLOTS)
        entries = [(system, reps) for system, reps in entries if reps[0]]
        if not entries:
            return
        keys = list(entries[0][1][0])
        tasks = self.meta["lengths"]["distance"]["tasks"]
        self.say("## Distance")
        self.say(f"A proxy delays every byte. Pairs of acquire and release in a closed loop, in one process: a task alone (the median, in round trips), and {tasks} tasks, pairs a second.")
        alone = [key for key in keys if dig(entries[0][1][0], key, "alone")]
        rows = [
            [system.name, *(Spread([rep[key]["alone"]["p50"] / rep[key]["trip"] for rep in reps if dig(rep, key, "alone")]) for key in alone), *(figure(reps, key, "many", "rate") for key in keys)]
            for system, reps in entries
        ]
        self.table(["", *(f"alone, {key.split(',')[0]}" for key in alone), *(f"{key}" for key in keys)], rows)
        one = [key for key in keys if key.endswith(" 1 key")]
        drawn = [(system.name, system.is_ours, [(float(key.split()[0]), figure(reps, key, "many", "rate").middle) for key in one if figure(reps, key, "many", "rate") and figure(reps, key, "many", "rate").middle]) for system, reps in entries]
        self.chart("distance", charts.curves(f"Pairs a second by {tasks} tasks, one key", "pairs a second", "round trip, ms", drawn), "Pairs over a distance")
        for key in keys:
            self.rank("Waits", f"pairs a second, {key}", [(system, figure(reps, key, "many", "rate"), not any(dig(rep, key, "many", "failed") for rep in reps)) for system, reps in entries], higher=True)
            if key in alone:
                self.rank("Waits", f"a pair alone, {key}", [(system, figure(reps, key, "alone", "p50"), True) for system, reps in entries])

    def growth(self):
        entries = self.of("growth", SLOTS)
        if not entries:
            return
        lengths = self.meta["lengths"]["growth"]
        self.say("## Growth")
        self.say(
            "*Processes*: pairs a second of 64 tasks, each with a free slot; and handovers a second (160 are possible) while as many tasks wait for 8 slots, "
            "held for 50 ms each. *Holders and waiters*: pairs a second of 8 tasks in one process beside other holders, and handovers "
            f"a second by {PROCESSES} processes among other waiters. In brackets: server time of each, in us."
        )

        def cell(reps, of, count):
            rate, cost = (figure(reps, of, str(count), key) for key in ("rate", "processor_us"))
            return f"{short(rate.middle)} [{short(cost.middle) if cost else '-'}]" if rate else "-"

        for title, columns in GROWTH:
            head = [f"{words} {count:,}" for of, words, lengths_of in columns for count in lengths[lengths_of]]
            counts = [(of, count) for of, _, lengths_of in columns for count in lengths[lengths_of]]
            self.say(f"### {title}")
            self.table(["", *head], [[system.name, *(cell(reps, of, count) for of, count in counts)] for system, reps in entries])
        self.say(f"-: not within {lengths['patience']} s, or not at all.")
        for name, of, words, unit, path in GROWTH_CHARTS:
            drawn = []
            for system, reps in entries:
                counts = lengths["processes" if of == "contended" else of]
                points = [(count, figure(reps, of, str(count), *path)) for count in counts]
                drawn.append((system.name, system.is_ours, [(count, value.middle) for count, value in points if value and value.middle]))
            if any(len(row[2]) > 1 for row in drawn):
                self.chart(name, charts.curves(words, unit, "processes" if of == "contended" else of, drawn), words)

    def service(self):
        rows = self.results.get("service")
        if not rows:
            return
        self.say("## In a service")
        half = next(iter(rows.values()))[0]["half"]
        self.say(
            f"axum with an empty handler, and a generator of its own: {CONNECTIONS} connections, requests by a Poisson clock, timed from when they were due. Latency at "
            f"{short(half)} a second, half of what the service does without a limit; and the highest rate with a p99 below {GOAL_MS} ms. Service, generator and Redis share the machine."
        )
        table = [[name, *(figure(reps, "latency", part) for part, _ in charts.MARKS), figure(reps, "highest")] for name, reps in rows.items()]
        self.table(["", "p50, ms", "p90", "p99", "p99.9", "longest", "highest rate"], table)
        drawn = [(name, "turnstile" in name, {part: figure(reps, "latency", part).middle for part, _ in charts.MARKS}) for name, reps in rows.items()]
        self.chart("service", charts.spreads("Latency of an empty handler", "milliseconds", drawn), "Latency in a service")

    def trace(self):
        entries = [(system, reps) for system, reps in self.of("trace", SLOTS) if reps[0]]
        if not entries:
            return
        one = entries[0][1][0]
        self.say("## A real trace")
        self.say(
            f"Calls of two services of Azure, {TRACE_FASTER} times faster: {one['asked']:,} calls in {short(one['seconds'])} s, by {TRACE_PROCESSES} processes, one pool of {TRACE_LIMIT} slots. "
            "A hold takes 30 ms for each generated token and 0.2 ms for each token of context, ten times faster too. *code* is short and comes in bursts, *conv* is long and steady. "
            "Source: the public sample of *Splitwise: Efficient generative LLM inference using phase splitting* (Patel et al., ISCA 2024), Azure/AzurePublicDataset, CC-BY 4.0. "
            "Only *tower-turnstile, fair* shares the pool between the services, so its *overtaken* includes requests that waited while a smaller tenant was served."
        )
        order = sorted(entries, key=lambda entry: figure(entry[1], "idle_seconds").middle)
        rows = []
        for system, reps in order:
            whole = Spread([100 * rep["whole"] / rep["asked"] for rep in reps])
            get = lambda *path: figure(reps, *path)
            left = "-" if system.store == "none" else get("left")
            rows.append([system.name, *(get("waits", kind, part) for kind in ("code", "conv") for part in ("p50", "p90", "p99")), whole, get("peak"), left, get("idle_seconds"), get("inversions")])
        self.table(["", "code p50, ms", "p90", "p99", "conv p50, ms", "p90", "p99", "answered whole, %", "peak", "left", "seconds with a free slot while somebody waited", "overtaken, %"], rows)
        for kind in ("code", "conv"):
            drawn = [(system.name, system.is_ours, {part: figure(reps, "waits", kind, part).middle for part, _ in charts.MARKS}) for system, reps in order]
            self.chart(f"trace-{kind}", charts.spreads(f"Waits of {kind}, by the trace", "milliseconds", drawn), f"Waits of {kind}")
        able = lambda reps: all(rep["peak"] <= TRACE_LIMIT and rep["whole"] == rep["asked"] for rep in reps)
        shared = [(system, reps) for system, reps in entries if system.store != "none"]
        self.rank("Idle slots", "seconds with a free slot while somebody waited, trace", [(system, figure(reps, "idle_seconds"), able(reps)) for system, reps in shared])
        self.rank("Fairness", "overtaken, trace", [(system, figure(reps, "inversions"), able(reps)) for system, reps in shared])

    def notes(self):
        self.say("## Systems and settings")
        for title, systems in (("Slots", SLOTS), ("Rates", RATES)):
            self.say(f"### {title}")
            self.table(["", "settings", "limitations"], [[system.name, system.settings, system.cannot] for system in systems])
        self.say("Not run:", "", *(f"- {name}: {why}." for name, why in [*NOT_RUN, *self.results.get("lacking", {}).items()]))
        self.say("## Commands")
        self.say(*(f"- `{command}`" for command in self.meta["commands"]))
        errors = sorted({(name, row["error"]) for case in ("standard", "long", "faults") for name, reps in self.results.get(case, {}).items() for rep in reps for row in rep.values() if row.get("error")})
        if errors:
            self.say("## Errors")
            self.say("Errors that systems reported in the standard, long and fault cases.")
            self.say(*(f"- {name}: `{error[:160]}`" for name, error in errors))
        if self.results.get("broken"):
            self.say("## Not completed")
            self.say(*(f"- {case}, {name}: `{error[:200]}`" for case, name, error in self.results["broken"]))


# Titles, and columns: the results, the words after the count, and where the counts are.
GROWTH = (
    ("Processes", (("processes", "pairs by", "processes"), ("contended", "handovers by", "processes"))),
    ("Holders and waiters", (("holders", "pairs beside", "holders"), ("waiters", "handovers among", "waiters"))),
)
HANDOVER = "milliseconds from a release to the next grant, median"
GROWTH_CHARTS = (
    ("growth-processes", "processes", "Pairs as processes grow", "pairs a second", ("rate",)),
    ("growth-contended", "contended", "Handover as processes grow", HANDOVER, ("handover", "p50")),
    ("growth-holders", "holders", "Pairs as holders grow", "pairs a second", ("rate",)),
    ("growth-waiters", "waiters", "Handover as waiters grow", HANDOVER, ("handover", "p50")),
)
STRICT = ("Fairness", "Overshoot", "Idle slots", "Faults")


def times(ratio):
    if ratio < 0.5:
        return f"1 / {short(1 / ratio)}"
    return f"{ratio:.2f} times" if ratio < 10 else f"{short(ratio)} times"


def is_sound(system, rows, loads):
    """Keeps the cap, and serves everybody, in every repetition of every load."""
    def is_good(row):
        return row["peak"] <= LIMIT and not row["failed"] and (system.store == "none" or row["left"] == LIMIT)

    return all(is_good(rep[load]) for rep in rows for load in loads if load in rep)


def mark(system, sound):
    return system.name + ("" if sound[system.name] else " ‡")
