"""Does what comes out equal what went in, after minutes of kills, outages and rescales?

First a driver dies at every place of every sink's commit; then, for `--seconds`, everything
is disturbed at random. The seed says what and when: `--seed` replays it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import servers
from tests.soak.chain import Chain
from tests.soak.schedule import matrix, schedule
from tests.soak.targets import TARGETS, new_site
from tests.soak.world import World
from tests.spark.support import ROOT

BATCHES_MIN = 200
"""That readers must have seen come, in a run of full length."""
OUTAGE_S = 20.0
RESULT = ROOT / "bench" / "results" / "soak.json"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def die_everywhere(folder: Path, names: list[str], seed: int) -> dict[str, Any]:
    """Every sink × every point, each a driver that is killed there."""
    places = matrix(names, [name for name in names if TARGETS[name].pieces])
    chain = Chain(new_site(folder), names, seed)
    for number, place in enumerate(places, 1):
        chain.die([place])
        say(f"{number:3d}/{len(places)}  {'killed' if place in chain.killed else 'passed'} {place}")
    if "postgres" in names:
        chain.outlast(servers.postgres(), OUTAGE_S)
        say(f"PostgreSQL was away for {OUTAGE_S:.0f} s in the middle of a commit")
    chain.finish()
    return {"killed_at": len(chain.killed), "not_passed": chain.passed_by}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--no-matrix", action="store_true", help="only the random part")
    parser.add_argument("--no-result", action="store_true", help="write no result file")
    options = parser.parse_args()
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    names = options.targets.split(",")
    folder = Path(tempfile.mkdtemp(prefix="cs"))
    say(f"seed {seed}; targets {', '.join(names)}; in {folder}")
    plan = schedule(seed, options.seconds, names, [name for name in names if TARGETS[name].pieces])
    result: dict[str, Any] = {"seed": seed, "seconds": options.seconds}
    try:
        if not options.no_matrix:
            result["matrix"] = die_everywhere(folder / "m", names, seed)
        for what in plan:
            print(f"    {what}")
        world = World(new_site(folder / "w"), names, seed, say)
        world.run(plan, options.seconds, BATCHES_MIN if options.seconds >= 600 else 0)
    except BaseException:
        say(f"failed; replay with --seed {seed}; what there is lies in {folder}")
        raise
    result |= world.result()
    result["schedule"] = [str(what) for what in plan]
    say(f"{result['in']} went in and came out of each: {', '.join(names)}")
    print(json.dumps({k: v for k, v in result.items() if k != "schedule"}, indent=2))
    if not options.no_result:
        keep(result)
    shutil.rmtree(folder, ignore_errors=True)


def keep(result: dict[str, Any]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    command = " ".join(["python", "-m", "tests.soak", *sys.argv[1:]])
    full = {"benchmark": "soak", "command": command, "commit": commit, **result}
    RESULT.write_text(json.dumps(full, indent=2) + "\n")


if __name__ == "__main__":
    main()
