"""Static analysis of mods: what each part depends on, and its range of values.

    facts = analyse(graph_module, ("score", "b", "h", "q", "k"), {"q": 4096, "k": 4096})
    facts[node].depends          # frozenset({"h", "q", "k"})
    facts[node].seen.coordinates # one Coordinate: q - k, between -4095 and 4095
    facts[node].form             # q - k + 4095
    facts[node].low, .high       # 0, 8190
    facts[node].cost             # instructions per score, of this node alone

`facts.forms` answers further questions: `grows`, `split`, `is_exact`. None of this reads a
captured tensor. For masks, `trace` gets the graph with one call, `evaluate` computes the interval
of every node for many boxes of scores at once, including captured tensors, and `find_span` finds
the one range of keys that each query sees, if there is one.

An operator without a rule (operators.py) is unknown, which is always sound: its value may be any
number of its dtype, and it depends on everything that its operands depend on.
"""

from flexhop.analysis.boxes import evaluate, evaluate_result, plain_inputs
from flexhop.analysis.cases import Cases
from flexhop.analysis.conditions import All, AtLeast, Choice, Equals, Leaf, Some, Truth, number_set
from flexhop.analysis.cost import (
    SELECT,
    elements_of,
    instructions_in_asked_mask,
    instructions_in_mask,
    instructions_of,
    is_function,
    name_of,
    rate,
)
from flexhop.analysis.ends import Ends, quotient_of
from flexhop.analysis.facts import Analysis, Facts, analyse
from flexhop.analysis.forms import Coordinate, Form, Forms, Seen, Split, agreed
from flexhop.analysis.graph import (
    Answers,
    Mod,
    carries_gradients,
    constant_of,
    dependents,
    dtype_of,
    is_comparison,
    is_conversion,
    is_float,
    is_smooth,
    passes_gradients,
    paths_below,
    reached,
    read_graph,
    value_of,
)
from flexhop.analysis.graph_tables import GraphTables
from flexhop.analysis.interval import INDICES, Interval, point
from flexhop.analysis.magnitudes import with_magnitudes
from flexhop.analysis.parts import limits_of, sum_of
from flexhop.analysis.spans import Span, find_span
from flexhop.analysis.tables import OutOfRange, Tables
from flexhop.analysis.trace import Mapped, Untraceable, trace
from flexhop.analysis.truths import truth_of
from flexhop.analysis.values import Values, can_compute
from flexhop.analysis.written import Writer, copied, settled

__all__ = [
    "INDICES",
    "SELECT",
    "All",
    "Analysis",
    "Answers",
    "AtLeast",
    "Cases",
    "Choice",
    "Coordinate",
    "Ends",
    "Equals",
    "Facts",
    "Form",
    "Forms",
    "GraphTables",
    "Interval",
    "Leaf",
    "Mapped",
    "Mod",
    "OutOfRange",
    "Seen",
    "Some",
    "Span",
    "Split",
    "Tables",
    "Truth",
    "Untraceable",
    "Values",
    "Writer",
    "agreed",
    "analyse",
    "can_compute",
    "carries_gradients",
    "constant_of",
    "copied",
    "dependents",
    "dtype_of",
    "elements_of",
    "evaluate",
    "evaluate_result",
    "find_span",
    "instructions_in_asked_mask",
    "instructions_in_mask",
    "instructions_of",
    "is_comparison",
    "is_conversion",
    "is_float",
    "is_function",
    "is_smooth",
    "limits_of",
    "name_of",
    "number_set",
    "passes_gradients",
    "paths_below",
    "plain_inputs",
    "point",
    "quotient_of",
    "rate",
    "reached",
    "read_graph",
    "settled",
    "sum_of",
    "trace",
    "truth_of",
    "value_of",
    "with_magnitudes",
]
