"""Runs tower-turnstile and its peers, and writes `benches/COMPARISON.md` with its charts. `.ci/peers` installs the peers and calls it."""

import argparse
import concurrent.futures
import datetime
import functools
import json
import multiprocessing
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
import traceback

import cases
import page
from cases import CASES
from systems import RATES, SLOTS, Runtimes

HERE = os.path.dirname(os.path.abspath(__file__))
FULL = {
    "standard": {"loads": [0.5, 0.8, 0.95, 1.2], "seconds": 6},
    "long": {"seconds": 30},
    "faults": {"lease_ms": 6_000, "before": 4, "frozen": 3, "after": 12},
    "rates": {"seconds": 60},
    "distance": {"trips_ms": [1, 5, 20], "keys": [1, 100, 10_000], "tasks": 200, "seconds": 1},
    "growth": {"processes": [1, 2, 4, 8], "holders": [10, 1_000, 100_000], "waiters": [1, 100, 10_000], "seconds": 1, "patience": 15},
    "service": {"seconds": 2, "steps": 5, "most": 256_000},
    "trace": {"seconds": 3_600},
}
QUICK = {
    "standard": {"loads": [0.95], "seconds": 2},
    "long": {"seconds": 6},
    "faults": {"lease_ms": 2_000, "before": 1, "frozen": 1, "after": 4},
    "rates": {"seconds": 2},
    "distance": {"trips_ms": [5], "keys": [1], "tasks": 50, "seconds": 0.5},
    "growth": {"processes": [1, 4], "holders": [10], "waiters": [100], "seconds": 0.5, "patience": 5},
    "service": {"seconds": 1, "steps": 0, "most": 1_000},
    "trace": {"seconds": 5},
}
# How many systems run at once, in cases that leave the processors idle: those that wait, and those that poll.
BESIDE = {"long": (3, 2), "faults": (3, 2), "trace": (4, 2)}
# These take the processors in the trace, and would disturb others.
ALONE = {"trace": ["throttle", "asyncio-advanced-semaphores", "py-redis-semaphore"]}
DEFAULTS = {"cases": ",".join(CASES), "repeat": 1, "seed": "1"}
# Of a quick look: a system in each language where it takes seconds, and else only ours.
QUICK_SYSTEMS = {
    "standard": ["tower-turnstile", "redis-semaphore", "py-redis-semaphore"],
    "rates": ["tower-turnstile", "rate-limiter-flexible", "limits"],
}
QUICK_SERVICES = ["no limit", "tower-turnstile, Redis"]


def main():
    options = arguments()
    kept = pathlib.Path(options.output, "comparison", "results.json")
    paths = [kept] * options.add + [path for path in options.page_of.split(",") if path]
    runs = [json.loads(pathlib.Path(path).read_text()) for path in paths]
    if not options.page_of:
        runs.append(run(options))
    results = together(runs)
    results["meta"]["remark"] = options.remark or results["meta"].get("remark", "")
    page.Page(results, options.output).write()
    kept.write_text(json.dumps(rounded(results), separators=(",", ":")) + "\n")
    print(os.path.join(options.output, "COMPARISON.md"))
    for case, name, error in results["broken"]:
        print(f"could not be run: {case}, {name}: {error}", file=sys.stderr)
    return bool(results["broken"])


def arguments():
    parser = argparse.ArgumentParser(prog=".ci/peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes: a few systems, to see that everything works")
    parser.add_argument("--cases", default=DEFAULTS["cases"], help="which of %(default)s")
    parser.add_argument("--systems", default="", help="names of systems, by semicolons, or all")
    parser.add_argument("--repeat", type=int, default=DEFAULTS["repeat"], help="how often everything is run, in turns (default: 1)")
    parser.add_argument("--trace", default="", help="the folder of azure-2023-code.csv and azure-2023-conv.csv")
    parser.add_argument("--trace-seconds", type=int, help="so much of the trace, of 343 s")
    parser.add_argument("--seed", default=DEFAULTS["seed"], help="of the arrivals")
    parser.add_argument("--peers", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rust", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--output", default=os.path.dirname(HERE), help="where the page is written")
    parser.add_argument("--remark", default="", help="a sentence of the page about how it was run")
    parser.add_argument("--add", action="store_true", help="to the runs that the page is of")
    parser.add_argument("--page-of", default="", help="only write the page again, from the results of earlier runs, by commas")
    return parser.parse_args()


def together(runs):
    """Results of several runs, with the words of the last."""
    results = runs[-1]
    for words in ("machine", "redis", "lengths"):
        if any(run["meta"][words] != results["meta"][words] for run in runs):
            sys.exit(f"the runs differ in their {words}: put together, they would say nothing")
    for run in runs[-2::-1]:
        for case, found in run.items():
            for name, rows in found.items() if case in CASES else ():
                of = results.setdefault(case, {}).setdefault(name, [])
                of[:0] = rows
        results["broken"][:0] = run["broken"]
    dates = sorted({run["meta"]["date"] for run in runs})
    commands = list(dict.fromkeys(command for run in runs for command in run["meta"]["commands"]))
    return results | {"meta": results["meta"] | {"date": " and ".join(dates), "commands": commands}}


def rounded(results):
    """With five significant digits, which is more than runs agree in."""
    match results:
        case float():
            return float(f"{results:.5g}")
        case dict():
            return {name: rounded(one) for name, one in results.items()}
        case list():
            return [rounded(one) for one in results]
    return results


def run(options):
    lengths = QUICK if options.quick else FULL
    if options.trace_seconds:
        lengths["trace"]["seconds"] = options.trace_seconds
    # A connection for each of 10,000 waiters.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    bench = cases.Bench(Runtimes(options.peers, options.rust), lengths, options.seed, options.trace)
    wanted = options.cases.split(",")
    lacking = {system.name: why for system in SLOTS if (why := bench.runtimes.lacks(system))}
    results = {case: {} for case in wanted} | {"broken": [], "lacking": lacking, "meta": about(options, lengths)}
    kept = os.path.join(options.peers, "results.json")
    for repeat in range(options.repeat):
        for case in wanted:
            for name, future in side_by_side(waves(bench, case, repeat, options)):
                try:
                    found, seconds = future.result()
                    for one, row in (found if case == "service" else {name: found}).items():
                        results[case].setdefault(one, []).append(row)
                    print(f"{case}, {name}, {repeat + 1} of {options.repeat}: {seconds:.0f} s", file=sys.stderr)
                except Exception as error:
                    traceback.print_exc()
                    results["broken"].append([case, name, str(error)])
                with open(kept, "w") as file:
                    json.dump(results, file)
    with open(kept) as file:
        return json.load(file)


def side_by_side(waves):
    """Runs the steps of each wave, in processes of their own, so many at once. Yields names and futures as they end."""
    for width, steps in waves:
        with concurrent.futures.ProcessPoolExecutor(width, multiprocessing.get_context("fork")) as pool:
            names = {pool.submit(timed, step): name for name, step in steps}
            for future in concurrent.futures.as_completed(names):
                yield names[future], future


def timed(step):
    begun = time.monotonic()
    return step(), time.monotonic() - begun


def waves(bench, case, repeat, options):
    """How many at once, and names and functions. The order turns with the repetition, so that none is always first."""
    if case == "service":
        kinds = QUICK_SERVICES if options.quick else list(cases.SERVICES)
        return [(1, [("service", functools.partial(cases.service, bench, kinds))])]
    if case == "trace" and not bench.trace:
        print("no trace: name its folder with --trace", file=sys.stderr)
        return []
    systems = [system for system in (RATES if case == "rates" else SLOTS) if system.takes_part(case) and not bench.runtimes.lacks(system)]
    names = options.systems.split(";") if options.systems else QUICK_SYSTEMS.get(case, ["tower-turnstile"]) if options.quick else ["all"]
    if names != ["all"]:
        systems = [system for system in systems if system.name in names]
    turn = repeat % max(1, len(systems))
    systems = systems[turn:] + systems[:turn]
    waiting, polling = BESIDE.get(case, (1, 1))
    alone = [system for system in systems if system.name in ALONE.get(case, [])]
    steps = lambda which: [(system.name, functools.partial(getattr(cases, case), bench, system, repeat)) for system in which]
    others = [system for system in systems if system not in alone]
    return [
        (waiting, steps(system for system in others if not system.polls)),
        (polling, steps(system for system in others if system.polls)),
        (1, steps(alone)),
    ]


def about(options, lengths):
    redis = subprocess.run([os.environ.get("REDIS_SERVER", "redis-server"), "--version"], capture_output=True, text=True, check=True)
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    machine = f"{os.cpu_count()} cores{f' ({models[0]})' if models else ''}, Linux {platform.release().split('-')[0]}"
    hidden = ("peers", "rust", "output", "remark")
    shown = {**vars(options), "trace": options.trace and "..."}
    words = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in shown.items()
             if value and key not in hidden and value != DEFAULTS.get(key)]
    return {
        "commands": [" ".join([".ci/peers", *words])],
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "redis": "Redis " + redis.stdout.split("v=")[-1].split()[0],
        "quick": options.quick,
        "lengths": lengths,
    }


if __name__ == "__main__":
    sys.exit(main())
