"""Kills by the hundred: ``python -m tests.faults --kills 300 --seed 1``, or ``make faults``.

One small fleet after another goes through a Kafka of its own; each of many workers is killed at a moment of chance. After every ten
kills an undisturbed worker finishes the stream, and its figures must be exactly those of the counting cores alone. Prints one line per
round and a table by moment; exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.faults.kills import OPTIONS, Kill, kills
from tests.kafka import empty_kafka
from tests.workers import Expected, View, Worker, small_stream

ROUND = 10


def one_round(number: int, seed: int, folder: Path) -> list[Kill]:
    """``number`` kills within one stream. Raises :class:`AssertionError` if the figures differ in the end."""
    stream = small_stream()
    with empty_kafka(folder / "kafka") as kafka:
        view = View(kafka)
        try:
            done = list(kills(kafka, stream, folder, number=number, seed=seed))
            worker = Worker(kafka.bootstrap_servers, folder, *OPTIONS)
            try:
                Expected(stream, kafka).on_topics(view)
            finally:
                worker.end()
        finally:
            view.close()
    return done


def table(done: Sequence[Kill]) -> str:
    """How often a worker ended at each moment, and what its successors had to go on from."""
    by_moment: dict[str, list[Kill]] = defaultdict(list)
    for kill in done:
        by_moment[kill.moment].append(kill)
    lines = [f"{'killed after':14}{'kills':>7}{'from snapshots':>16}{'median life':>13}"]
    for moment, of_it in by_moment.items():
        life = statistics.median(kill.seconds for kill in of_it)
        lines.append(f"{moment:14}{len(of_it):7}{sum(kill.restored > 0 for kill in of_it):16}{life:11.1f} s")
    return "\n".join(lines)


def main() -> int:
    """Run the rounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    done: list[Kill] = []
    began = time.monotonic()
    while len(done) < given.kills:
        seed = given.seed + len(done) // ROUND
        with tempfile.TemporaryDirectory(prefix="kvcensus-faults-") as folder:
            try:
                done += one_round(min(ROUND, given.kills - len(done)), seed, Path(folder))
            except AssertionError as error:
                sys.stderr.write(f"seed {seed}: {error}\n")
                return 1
        sys.stdout.write(f"{len(done)} kills, seed {seed}: the figures of an undisturbed run; {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{table(done)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
