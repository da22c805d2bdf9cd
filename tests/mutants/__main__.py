"""``python -m tests.mutants``: programs with one wrong collective each, and whether other ranks show it.

``--only`` programs with a text in their name, one ``--every`` so many mutants, ``--processes`` programs at once.
"""

import re
import sys

from tests.benchmarks.tools import command_line
from tests.mutants.programs import EQUIVALENT
from tests.mutants.running import outcomes

if __name__ == "__main__":
    options = command_line(__doc__, only="", every=1, processes=2)
    total = noticed = listed = failed = 0
    found = dict[str, set[str]]()  # the reasons by program; one of a missing package is not run
    for each in outcomes(options.only, options.every, processes=options.processes):
        counts = f"{each.number:5d} mutants, {len(each.noticed):5d} noticed, {len(each.equivalent):4d} equivalent"
        print(f"{each.program:40.40s} {counts} {each.seconds:6.1f} s", flush=True)
        for why in dict.fromkeys(each.equivalent.values()):
            print(f"    {list(each.equivalent.values()).count(why)} equivalent: {why}")
        for mutant in each.missed:
            print(f"    neither noticed nor equivalent: {mutant}")
        for alarm in each.alarms:
            print(f"    of the right program: {alarm}")
        total, noticed, listed = total + each.number, noticed + len(each.noticed), listed + len(each.equivalent)
        failed += len(each.missed) + len(each.alarms)
        found[each.program] = {*each.equivalent.values()}
    listed_for_these = {why for of, _, why in EQUIVALENT if any(re.search(of, program) for program in found)}
    unused = listed_for_these.difference(*found.values()) if not options.only and options.every == 1 else ()
    for why in unused:
        print(f"no mutant is equivalent for this reason: {why}")
    print(f"{total} mutants: {noticed} noticed, {listed} equivalent, {failed} wrong")
    sys.exit(failed > 0 or len(unused) > 0)
