"""Templates of small functions. `$x` is a parameter, `$K` a digit that is drawn for each task."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """A function without its final names.

    Attributes:
      key: unique name.
      names: what the function may be called.
      params: kind of each parameter, name -> key of `POOLS`.
      doc: exact enough to write the body from it, unless `opaque`.
      body: lines.
      imports: lines that go to the top of the module.
      opaque: whether name and docstring say nothing about the digits in the body, so that only
        tests do.
    """

    key: str
    names: tuple[str, ...]
    params: dict[str, str]
    doc: str
    body: tuple[str, ...]
    imports: tuple[str, ...] = ()
    opaque: bool = False


# Names of parameters by kind; `build` draws arguments by kind.
POOLS = {
    "numbers": ("values", "items", "sizes", "costs"),
    "number": ("limit", "step", "low", "mark"),
    "count": ("count", "size", "times", "width"),
    "text": ("text", "line", "title", "note"),
    "table": ("table", "stock", "ages", "rates"),
    "key": ("key", "name", "label", "code"),
}


def _template(
    key: str, names: str, params: str, doc: str, body: str, imports: str = "", opaque: bool = False
) -> Template:
    kinds = dict(param.split(":") for param in params.split())
    lines = tuple(body.strip().splitlines())
    return Template(key, tuple(names.split()), kinds, doc, lines, tuple(imports.split(";")) if
                    imports else (), opaque)  # fmt: skip


TEMPLATES = {
    template.key: template
    for template in (
        _template(
            "sum_above",
            "sum_above total_above",
            "a:numbers b:number",
            "Sum of the $a that are greater than $b.",
            """
total = 0
for item in $a:
    if item > $b:
        total += item
return total
""",
        ),
        _template(
            "count_below",
            "count_below number_below",
            "a:numbers b:number",
            "How many of the $a are less than $b.",
            """
found = 0
for item in $a:
    if item < $b:
        found += 1
return found
""",
        ),
        _template(
            "keep_from",
            "keep_from select_from",
            "a:numbers b:number",
            "The $a that are at least $b.",
            "return [item for item in $a if item >= $b]",
        ),
        _template(
            "add_to_all",
            "add_to_all raise_all",
            "a:numbers b:number",
            "Each of the $a plus $b.",
            "return [item + $b for item in $a]",
        ),
        _template(
            "scale",
            "scale_all times_all",
            "a:numbers b:count",
            "Each of the $a times $b.",
            """
result = []
for item in $a:
    result.append(item * $b)
return result
""",
        ),
        _template(
            "mean",
            "mean_of average",
            "a:numbers",
            "Sum of the $a divided by how many they are, rounded down; 0 if there are none.",
            """
if not $a:
    return 0
return sum($a) // len($a)
""",
        ),
        _template(
            "spread",
            "spread_of span_of",
            "a:numbers b:number",
            "Largest of the $a minus the smallest, plus $b.",
            "return max($a) - min($a) + $b",
        ),
        _template(
            "position",
            "position_of find_first",
            "a:numbers b:number",
            "Index of the first of the $a that equals $b, or -1.",
            """
for index in range(len($a)):
    if $a[index] == $b:
        return index
return -1
""",
        ),
        _template(
            "last",
            "last_or latest_or",
            "a:numbers b:number",
            "The last of the $a, or $b if there are none.",
            "return $a[-1] if $a else $b",
        ),
        _template(
            "tail",
            "rest_plus tail_plus",
            "a:numbers b:number",
            "Sum of the $a without the first one, plus $b.",
            "return sum($a[1:]) + $b",
        ),
        _template(
            "range_sum",
            "range_sum sum_between",
            "a:number b:count",
            "Sum of the $b whole numbers from $a on.",
            """
total = 0
for number in range($a, $a + $b):
    total += number
return total
""",
        ),
        _template(
            "countdown",
            "countdown steps_down",
            "a:count",
            "The whole numbers from $a down to 1.",
            """
result = []
for number in range($a, 0, -1):
    result.append(number)
return result
""",
        ),
        _template(
            "clamp",
            "clamp hold_between",
            "a:number b:number c:count",
            "$a, but at least $b and at most $b + $c.",
            """
if $a < $b:
    return $b
return min($a, $b + $c)
""",
        ),
        _template(
            "area",
            "frame_area border_area",
            "a:count b:count",
            "$a times $b, minus ($a - 1) times ($b - 1).",
            """
outer = $a * $b
inner = ($a - 1) * ($b - 1)
return outer - inner
""",
        ),
        _template(
            "lookup",
            "lookup get_or",
            "a:table b:key c:number",
            "What $a has for $b, or $c if it has nothing.",
            "return $a.get($b, $c)",
        ),
        _template(
            "table_total",
            "table_total sum_for",
            "a:table b:number",
            "Sum of the values of $a that are at most $b.",
            """
total = 0
for value in $a.values():
    if value <= $b:
        total += value
return total
""",
        ),
        _template(
            "repeat",
            "repeat_text copies_of",
            "a:text b:count",
            "$a, $b times, with a comma between.",
            """
parts = [$a] * $b
return ",".join(parts)
""",
        ),
        _template(
            "word",
            "word_at nth_word",
            "a:text b:number",
            "The word of $a at index $b, or '' if there is none.",
            """
words = $a.split()
if $b < len(words):
    return words[$b]
return ""
""",
        ),
        _template(
            "prefix",
            "prefix_of cut_text",
            "a:text b:count",
            "The first $b characters of $a.",
            "return $a[:$b]",
        ),
        _template(
            "initials",
            "initials first_letters",
            "a:text b:text",
            "First letters of the words of $a, then $b.",
            """
letters = [word[0] for word in $a.split()]
return "".join(letters) + $b
""",
        ),
        _template(
            "hypot",
            "diagonal distance_to",
            "a:count b:count",
            "Whole part of the square root of $a squared plus $b squared.",
            "return math.isqrt($a * $a + $b * $b)",
            imports="import math",
        ),
        _template(
            "lcm",
            "common_multiple meet_after",
            "a:count b:count",
            "The smallest number that both $a and $b divide.",
            "return $a * $b // math.gcd($a, $b)",
            imports="import math",
        ),
        _template(
            "running",
            "running_totals sums_so_far",
            "a:numbers b:number",
            "For each of the $a the sum up to there, plus $b.",
            """
sums = itertools.accumulate($a)
return [item + $b for item in sums]
""",
            imports="import itertools",
        ),
        _template(
            "common",
            "most_common usual",
            "a:numbers b:number",
            "How often the most frequent of the $a and $b together occurs.",
            """
counts = collections.Counter($a + [$b])
return max(counts.values())
""",
            imports="import collections",
        ),
        _template(
            "line",
            "score rating",
            "a:number",
            "The score for $a.",
            "return $K * $a + $L",
            opaque=True,
        ),
        _template(
            "fold",
            "weight points",
            "a:numbers",
            "The weight of the $a.",
            """
total = $K
for item in $a:
    total += item * $L
return total
""",
            opaque=True,
        ),
        _template(
            "wheel",
            "slot place",
            "a:number b:number",
            "The slot for $a and $b.",
            "return ($a * $K + $b) % $L",
            opaque=True,
        ),
        _template(
            "offset",
            "shifted moved",
            "a:numbers",
            "The $a, moved.",
            """
result = []
for item in $a:
    result.append(item - $K)
return result
""",
            opaque=True,
        ),
        _template(
            "toll",
            "toll duty",
            "a:number",
            "The toll for $a.",
            "return $a + $K",
            opaque=True,
        ),
        _template(
            "bonus",
            "bonus extra",
            "a:numbers",
            "The bonus for the $a.",
            "return sum($a) + $K",
            opaque=True,
        ),
        _template(
            "marks",
            "marks signs",
            "a:numbers",
            "The $a, marked.",
            "return [item * $K for item in $a]",
            opaque=True,
        ),
        _template(
            "pace",
            "pace tempo",
            "a:number b:count",
            "The pace for $a and $b.",
            "return $a * $b + $K",
            opaque=True,
        ),
        _template(
            "seat",
            "seat bench",
            "a:number b:count",
            "The seat for $a and $b.",
            "return $a + $b * $K",
            opaque=True,
        ),
        _template(
            "fee",
            "fee charge",
            "a:number b:count",
            "The fee for $a and $b.",
            """
base = $a * $K
return base + $b * $L
""",
            opaque=True,
        ),
    )
}

# Packages and their modules; the words carry no meaning for the tasks.
PACKAGES = {
    "shop": ("cart", "price", "bill", "order"),
    "bank": ("account", "loan", "cash", "ledger"),
    "farm": ("field", "barn", "herd", "crop"),
    "game": ("board", "player", "round", "level"),
    "lab": ("sample", "probe", "trial", "sensor"),
    "school": ("grade", "lesson", "course", "exam"),
    "trip": ("route", "hotel", "train", "ticket"),
    "news": ("story", "page", "reader", "issue"),
}
CALLERS = ("report", "summary", "check", "describe", "entry", "result")
