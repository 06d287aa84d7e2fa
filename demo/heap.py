"""The demo's program: builds a large live heap, then works on it. Knows nothing of compcache.

An index over generated measurements, as an analysis job would hold it: records by station and by day, the way Python
keeps them (dictionaries, lists, strings, floats). It is then read in order, read by day, and partly rewritten. What it
prints depends on every record, so two runs that agree had the same memory.
"""

import hashlib
import random
import sys
import time

STATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
DAYS = 1000


def build(random_numbers):
    index = {}
    for number in range(STATIONS):
        name = f"station-{number:05d}"
        place = random_numbers.choice(["coast", "valley", "plateau", "forest", "city"])
        level = random_numbers.uniform(-5, 25)
        days = []
        for day in range(DAYS):
            level += random_numbers.gauss(0, 0.3)
            days.append({"day": day, "temperature": round(level, 2), "note": f"{place}, reading {day} of {name}"})
        index[name] = days
    return index


def main():
    begun = time.monotonic()
    random_numbers = random.Random(2009)
    index = build(random_numbers)
    digest = hashlib.sha256()
    for name, days in index.items():
        digest.update(f"{name} {sum(record['temperature'] for record in days):.2f}".encode())
    for day in range(0, DAYS, 200):
        digest.update(repr(max((days[day]["temperature"], name) for name, days in index.items())).encode())
    # Most later work stays with a tenth of the stations.
    often = random_numbers.sample(sorted(index), STATIONS // 10)
    for _ in range(60):
        for name in often:
            for record in index[name]:
                record["temperature"] = round(record["temperature"] * 0.999, 4)
    for name, days in index.items():
        for record in days:
            digest.update(f"{record['day']}{record['temperature']}{record['note']}".encode())
    print(digest.hexdigest())
    print(f"{STATIONS * DAYS} records, {time.monotonic() - begun:.1f} s", file=sys.stderr)


main()
