"""make demo: one program with all the memory it wants, under compcache, and under the kernel's zram.

    python3 demo/run.py target/release

The program (heap.py) is run alone first, to learn how much memory it needs. Then it gets two fifths of that, by
`compcache run --ram`. Where the machine has kernel zram (root, /dev/zram* free), the same program then runs in a memory
cgroup of the size that stayed resident under compcache when most was stored, with zram (lz4) as swap: about the same memory in
all on both sides, so the times can be compared.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

SHARE = 0.4
MIB = 1 << 20


def timed(command):
    """Runs command; returns its output, seconds, peak resident bytes, or exits with its words."""
    begun = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"demo: {' '.join(command)} ended with {child.returncode}")
    return output, time.monotonic() - begun, usage.ru_maxrss << 10


def under_zram(bench, resident_bytes, program, scratch):
    """The same under kernel zram: (output, seconds, resident, total), or why not."""
    if os.geteuid() != 0:
        return "it needs root: memory cgroups and swap are set up for it"
    if not (os.path.exists("/sys/class/zram-control") or os.path.exists("/dev/zram0")):
        return "this kernel has no zram (modprobe zram)"
    with open("/proc/swaps") as swaps:
        if len(swaps.readlines()) > 1:
            return "swap is in use already, and would blur the comparison"
    record = os.path.join(scratch, "zram.json")
    command = [bench, "baseline", "--ram", str(resident_bytes), "--swap", "zram:lz4", "--json", record, "--", *program]
    ran = subprocess.run(command, stdout=subprocess.PIPE)
    if ran.returncode != 0:
        return f"compcache-bench ended with {ran.returncode}"
    with open(record) as file:
        outcome = json.load(file)["outcome"]
    return ran.stdout, outcome["wall_s"], outcome["peak"]["resident_bytes"], outcome["peak"]["total_bytes"]


def main():
    release = os.path.abspath(sys.argv[1])
    compcache, bench = os.path.join(release, "compcache"), os.path.join(release, "compcache-bench")
    program = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "heap.py"), *sys.argv[2:]]

    print("1. The program alone, with all the memory it wants", flush=True)
    wanted, alone_s, need = timed(program)
    ram = int(need * SHARE) // MIB * MIB
    print(f"   needs {need / MIB:.0f} MiB\n", flush=True)

    with tempfile.TemporaryDirectory(prefix="compcache-demo-") as scratch:
        print(f"2. compcache run --ram {ram // MIB}M -- python3 demo/heap.py", flush=True)
        stats = os.path.join(scratch, "stats.json")
        got, ours_s, _ = timed([compcache, "run", "--ram", str(ram), "--stats", stats, "--", *program])
        with open(stats) as file:
            ours = json.load(file)

        resident = ours["total_peak_bytes"] - ours["mem_used_at_peak_bytes"]
        print("\n3. Kernel zram (lz4), a memory cgroup of the same resident size", flush=True)
        zram = under_zram(bench, resident, program, scratch) if ours["evicted_pages"] else "nothing was evicted under compcache"
    print()

    rows = [("alone", alone_s, need, need, wanted), ("compcache run", ours_s, resident, ours["total_peak_bytes"], got)]
    if isinstance(zram, str):
        print(f"   skipped: {zram}\n")
    else:
        rows.append(("kernel zram lz4", zram[1], zram[2], zram[3], zram[0]))
    print(f"{'':18}{'time':>9}{'resident':>13}{'all memory':>13}   result")
    for name, seconds, resident, total, output in rows:
        same = "the same" if output == wanted else "DIFFERENT"
        print(f"{name:18}{seconds:7.1f} s{resident / MIB:9.0f} MiB{total / MIB:9.0f} MiB   {same}")
    saved = 100 - 100 * ours["total_peak_bytes"] / need
    print(f"\ncompcache saved {saved:.0f} % of the program's memory; it took {ours_s / alone_s:.2f} times as long.")
    if not isinstance(zram, str):
        print(f"Kernel zram took {zram[1] / ours_s:.2f} times as long as compcache.")
    if any(row[4] != wanted for row in rows):
        sys.exit("demo: the results differ")


main()
