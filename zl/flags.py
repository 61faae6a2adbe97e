"""The bits of the row and step columns, in one place for all who read or write them.

Owns no state; imports nothing, so that parts which must not know the device can know its flags.
"""

from __future__ import annotations

# RowColumns.row_flags
IGNORE_EOS = 1
LOGPROBS = 2

# StepSlot.seg_flags
SAMPLE = 1
FIRST = 2

# StepSlot.out_flags
EOS = 1
LENGTH = 2
NUMERIC = 4
SKIPPED = 8
