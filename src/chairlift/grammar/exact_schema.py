"""Grammars of JSON schemas with numbers that llguidance would round to a double.

llguidance (1.9.1) reads every number of a schema as a double, so that an integer above 2**53 becomes another one. In a
schema with such numbers, the parts that contain them are rules of a grammar in Lark, where the numbers are patterns.
The other parts remain JSON schemas within it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from chairlift.grammar.followed_schema import ANNOTATIONS, SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS, declared_types
from chairlift.grammar.merged_schema import NUMERIC, hashable, merged
from chairlift.grammar.number_patterns import integer_pattern, real_pattern

Schema: TypeAlias = Mapping[str, Any]

INEXACT: Final = 1 << 53
LARGEST: Final = (1 << 63) - 1024
"""The largest absolute value of a bound, which llguidance reads as a double and converts to 64 bits."""

LONG_NUMBER: Final = re.compile(r"\d{16}|\d[eE]")
"""What the text of a schema with inexact numbers contains."""

MISUSE: Final = (ValueError, TypeError, AttributeError, ArithmeticError)
"""What the use of a schema raises that is not valid: its keywords may have any values."""

TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
ARRAY: Final = frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems"))
OBJECT: Final = frozenset(("properties", "required", "additionalProperties"))
STRING: Final = frozenset(("minLength", "maxLength", "pattern", "format"))
DOCUMENT: Final = frozenset(("$defs", "definitions", "$schema", "$id", "id", "$anchor", "x-guidance"))
HANDLED: Final = NUMERIC | ARRAY | OBJECT | STRING | {"type", "enum"}
NAME: Final = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'
JSON_SPACE: Final = r"[\x20\x0A\x0D\x09]+"
MAX_RULES: Final = 2000
MAX_TEXT: Final = 1 << 19
MAX_READ: Final = 1 << 23
"""The maximum size of the parts that are merged or written, each counted as often as references repeat it."""

MAX_MULTIPLES: Final = 256
MAX_DIGITS: Final = 64
MAX_DEPTH: Final = 100
FLOAT_DIGITS: Final = 15  # A decimal number with as many digits is the only one of them with its double.


def json_symbol(schema: Schema, options: Schema) -> str:
    """A symbol of Lark for the values of a schema, which is `%json` unless it has inexact numbers.

    Args:
        options: llguidance's options of JSON.

    Raises:
        ValueError: a number can neither be kept exactly nor be replaced by a narrower bound.
    """
    text = json.dumps({**schema, "x-guidance": options})
    return f"%json {text}" if LONG_NUMBER.search(text) is None else _ExactSchema(schema, options).symbol()


class _ExactSchema:
    """Writes the rules of one schema. A schema is written once, with its JSON text as the key, so that references may
    be recursive."""

    def __init__(self, schema: Schema, options: Schema) -> None:
        self._root, self._options = schema, options
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._size, self._num_read = 0, 0
        self._depth = 0
        self._explored: dict[int, Any] = {}  # The schemas are kept, so that ids are unique.
        self._inexact: set[int] = set()

    @cached_property
    def _document(self) -> dict[str, Any]:
        """The document of a part that has references: they lead to the whole schema."""
        draft = {key: self._root[key] for key in ("$schema",) if key in self._root}
        root = {key: value for key, value in self._root.items() if key not in ("$schema", "$id", "x-guidance")}
        return {**draft, "$defs": {"root": _relinked(root)}}

    def symbol(self) -> str:
        options = self._options
        try:
            if not self._is_inexact(self._root):
                return f"%json {json.dumps({**self._root, 'x-guidance': options})}"
            start = self._rule(self._root)
            space = options.get("whitespace_pattern") or (
                JSON_SPACE if options.get("whitespace_flexible", True) else None
            )
            skip = [] if space is None else ['%llguidance {"ignore_once": true}', f"%ignore {_pattern(space)}"]
            comma, colon = (_pattern(options.get(*each)) for each in (("item_separator", ","), ("key_separator", ":")))
        except (*MISUSE, RecursionError) as error:
            with contextlib.suppress(*MISUSE):
                return f"%json {json.dumps({**_narrowed(self._root), 'x-guidance': options})}"
            reason = error if type(error) is ValueError else f"a schema with integers above 2**53 is not valid: {error}"
            raise ValueError(str(reason)) from None
        return "\n".join(["%lark {", *skip, f"start: {start}", f"comma: {comma}", f"colon: {colon}", *self._rules, "}"])

    def _add(self, rule: str) -> None:
        self._rules.append(rule)
        self._size += len(rule)
        self._check_limits()

    def _read(self, part: Any) -> str:
        """The JSON text of a part, which counts as work."""
        text = json.dumps(part)
        self._num_read += len(text)
        self._check_limits()
        return text

    def _check_limits(self) -> None:
        if len(self._rules) > MAX_RULES or self._size > MAX_TEXT or self._num_read > MAX_READ:
            raise ValueError(
                f"an integer above 2**53 is in a schema that has more than {MAX_RULES} rules or {MAX_TEXT} bytes as a "
                f"grammar, or {MAX_READ} bytes with its repeated parts: simplify it"
            )

    def _merged(self, first: Any, second: Any) -> Any:
        self._read([first, second])
        return merged(first, second)

    def _rule(self, part: Any) -> str:
        """The name of the rule of a schema."""
        part = {} if part is True else {"enum": []} if part is False else part
        if not isinstance(part, dict):
            raise ValueError(f"a schema must be an object or a boolean, got {part!r:.100}")
        key = self._read(part)
        if key not in self._names:
            name = self._names[key] = f"r{len(self._names)}"
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError("schemas with integers above 2**53 refer to each other without an end")
            self._add(f"{name}: {self._expression(part) if self._is_inexact(part) else self._leaf(part)}")
            self._depth -= 1
        return self._names[key]

    def _leaf(self, part: Schema) -> str:
        document = self._document if '"$ref"' in json.dumps(part) else {}
        return f"%json {json.dumps({**_relinked(part), **document, 'x-guidance': self._options})}"

    def _expression(self, part: Schema) -> str:
        rest = {key: value for key, value in part.items() if key not in ANNOTATIONS | DOCUMENT}
        if "$ref" in rest:
            target = self._target(rest.pop("$ref"))
            return self._rule(self._merged(rest, target))
        for key in ("allOf", "anyOf", "oneOf"):
            if key in rest:
                options = rest.pop(key)
                if key == "allOf":
                    for option in options:
                        rest = self._merged(rest, self._resolved(option))
                    return self._rule(rest)
                if key == "oneOf" and not (self._options.get("coerce_one_of") or _are_disjoint(options)):
                    raise ValueError("oneOf with integers above 2**53 needs options of different types: use anyOf")
                possible = [option for option in (self._merged(rest, each) for each in options) if option is not False]
                return self._alternatives([self._rule(option) for option in possible])
        if "const" in rest:
            rest["enum"] = [rest.pop("const")]
        if unknown := rest.keys() - HANDLED:
            raise ValueError(
                f"{', '.join(sorted(unknown))} cannot be combined with integers above 2**53: remove it, or the integers"
            )
        return self._values(rest, rest.pop("enum")) if "enum" in rest else self._typed(rest)

    def _resolved(self, part: Any) -> Any:
        is_reference = isinstance(part, dict) and part.keys() - ANNOTATIONS == {"$ref"}
        return self._target(part["$ref"]) if is_reference else part

    def _target(self, reference: Any) -> Any:
        if not _is_local(reference):
            raise ValueError(f"the reference {reference!r:.100} to integers above 2**53 must be a path like #/$defs/A")
        target: Any = self._root
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name) if isinstance(target, list) else name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"the reference {reference!r:.100} has no target") from None
        return target

    def _is_inexact(self, part: Any) -> bool:
        """Whether a schema, or one that it contains or refers to, has a number that llguidance rounds."""
        if not isinstance(part, dict):
            return False
        self._explore(part)
        return id(part) in self._inexact

    def _explore(self, part: Schema) -> None:
        """Find the inexact schemas among a schema and all that it leads to, each of which is visited once. References
        may form cycles, so that the result goes from each number to the schemas that lead to it."""
        found, parents = [part], defaultdict[int, list[int]](list)
        inexact: list[int] = []
        for each in found:
            if id(each) in self._explored:
                continue
            self._explored[id(each)] = each
            children = [child for child in self._children(each) if isinstance(child, dict)]
            found += children
            for child in children:
                parents[id(child)].append(id(each))
            own = (each[key] for key in NUMERIC | {"const", "enum"} if key in each)
            if any(map(_has_inexact, own)) or any(id(child) in self._inexact for child in children):
                inexact.append(id(each))
        while inexact:
            if (known := inexact.pop()) not in self._inexact:
                self._inexact.add(known)
                inexact += parents[known]

    def _children(self, part: Schema) -> Iterator[Any]:
        yield from (child for key, child in _children(part) if key not in DOCUMENT)
        if "$ref" in part:
            yield self._target(part["$ref"])

    def _values(self, rest: Schema, values: list[Any]) -> str:
        """The values of an enumeration, as far as its sibling keywords permit them."""
        plain, options = [], []
        types, has_inexact_parts = declared_types(rest), any(map(self._is_inexact, self._children(rest)))
        for value in values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not _permits(rest, value):
                    continue
                if _has_inexact(value):
                    options.append(f'"{_exact(value)}"')
                    continue
            elif isinstance(value, list | dict) and (has_inexact_parts or _has_inexact(value)):
                constant = _constant(value)
                if not types or constant["type"] in types:
                    options.append(self._rule(self._merged(rest, constant)))
                continue
            plain.append(value)
        if plain:
            left_out = NUMERIC | (ARRAY | OBJECT if has_inexact_parts else frozenset())
            options.append(self._rule({**{k: v for k, v in rest.items() if k not in left_out}, "enum": plain}))
        return self._alternatives(options)

    def _alternatives(self, options: list[str]) -> str:
        if not options:
            raise ValueError("no value satisfies all keywords of a schema with integers above 2**53")
        return " | ".join(options)

    def _typed(self, part: Schema) -> str:
        """The values of a schema without references, combinations and enumerations, by their types."""
        types = declared_types(part) or list(TYPES)
        options = []
        if "number" in types or "integer" in types:
            options.append(self._number({key: part[key] for key in NUMERIC if key in part}, "number" not in types))
        for kind, keys, write in (("array", ARRAY, self._array), ("object", OBJECT, self._object)):
            if kind in types and any(map(self._is_inexact, self._children({k: part[k] for k in keys if k in part}))):
                options.append(write(part))
                types = [each for each in types if each != kind]
        if others := [each for each in types if each not in ("number", "integer")]:
            options.append(self._rule({**{k: v for k, v in part.items() if k not in NUMERIC}, "type": others}))
        return " | ".join(options)

    def _number(self, bounds: dict[str, Any], is_integer: bool) -> str:
        if not _has_inexact(list(bounds.values())):
            return self._rule({"type": "integer" if is_integer else "number", **bounds})
        low, has_low = _bound(bounds, "inimum", max)
        high, has_high = _bound(bounds, "aximum", min)
        step = _step(bounds)
        if is_integer or step is not None:
            first, last = _integer_bounds(bounds)
            return _multiples(first, last, step) if step is not None else f"/{integer_pattern(first, last)}/"
        parts = []
        for bound, has_bound, is_low in ((low, has_low, True), (high, has_high, False)):
            if bound is not None and bound.denominator > 1:  # It is small, and the other one is not.
                cut = Fraction(math.ceil(bound) if is_low else math.floor(bound))
                keys = ("minimum", "maximum") if is_low else ("maximum", "minimum")
                own = keys[0] if has_bound else "exclusive" + keys[0].title()
                parts.append(self._rule({"type": "number", own: float(bound), keys[1]: int(cut)}))
                low, has_low, high, has_high = (cut, True, high, has_high) if is_low else (low, has_low, cut, True)
        parts.append(f"/{real_pattern(low, high, has_low=has_low, has_high=has_high)}/")
        return " | ".join(parts)

    def _array(self, part: Schema) -> str:
        prefix, items = part.get("prefixItems", []), part.get("items", True)
        if isinstance(items, list):
            prefix, items = items, part.get("additionalItems", True)
        least, most = max(int(part.get("minItems", 0)), 0), part.get("maxItems")
        if items is False:
            most = min(len(prefix), len(prefix) if most is None else int(most))
        prefix = prefix[: None if most is None else int(most)]
        if most is not None and least > most:
            raise ValueError(f"minItems {least} is greater than the number of items that are allowed, {most}")
        low, high = max(least - len(prefix), 0), None if most is None else int(most) - len(prefix)
        tail = ""
        if high != 0:
            rule = self._rule(items)
            after = "" if prefix else f"{rule} "
            counts = (low, high) if prefix else (max(low - 1, 0), None if high is None else high - 1)
            tail = f"{after}(comma {rule}){{{counts[0]},{'' if counts[1] is None else counts[1]}}}"
            tail = tail if low or prefix else f"({tail})?"
        rules = [f"{'comma ' if index else ''}{self._rule(each)} " for index, each in enumerate(prefix)]
        for rule in reversed(rules[least:]):
            tail = f"{self._named(rule + tail)}?"
        return f'"[" {"".join(rules[:least])}{tail} "]"'

    def _object(self, part: Schema) -> str:
        properties, required = part.get("properties", {}), part.get("required", [])
        other = part.get("additionalProperties", True)
        names = list(dict.fromkeys([*properties, *required]))
        required = set(required)
        fields = [
            (f"{_quoted(name)} colon {self._rule(properties.get(name, other))}", name in required)
            for name in names
            if properties.get(name, other) is not False or name in required
        ]
        after, options, is_empty = "", [], True
        if other is not False:
            token = f"NAME{len(self._rules)}"
            taken = " | ".join(map(_quoted, names))
            self._add(f"{token}: {NAME} & ~({taken})" if names else f"{token}: {NAME}")
            field = f"{token} colon {self._rule(other)}"
            after, options = self._named(f"(comma {field})*"), [f"{field} (comma {field})*"]
        for field, is_required in reversed(fields):
            if is_required:
                options, is_empty = [], False
            options.append(f"{field} {after}")
            after = self._named(f"comma {field} {after}" if is_required else f"(comma {field})? {after}")
        inner = f"({' | '.join(options)}){'?' * is_empty}" if options else ""
        return f'"{{" {inner} "}}"'

    def _named(self, expression: str) -> str:
        name = f"f{len(self._rules)}"
        self._add(f"{name}: {expression}")
        return name


def _children(part: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas that a schema contains, each with the keyword of `part` that has it."""
    for key, value in part.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            yield from ((key, child) for child in value.values())
        elif key in SCHEMA_LISTS and isinstance(value, list):
            yield from ((key, child) for child in value)
        elif key in SCHEMAS:
            yield key, value


def _is_local(reference: Any) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _relinked(value: Any) -> Any:
    """A copy of a schema whose references lead to `#/$defs/root`. Raises ValueError if it has other addresses."""
    if isinstance(value, list):
        return [_relinked(each) for each in value]
    if not isinstance(value, dict):
        return value
    copied = {key: each if key in ("const", "enum") else _relinked(each) for key, each in value.items()}
    reference = copied.get("$ref")
    if isinstance(copied.get("$id"), str) or (isinstance(reference, str) and not _is_local(reference)):
        raise ValueError(
            "a schema with integers above 2**53 must not have $id, or references that are not like #/$defs/A"
        )
    return copied | ({"$ref": f"#/$defs/root{reference[1:]}"} if isinstance(reference, str) else {})


def _has_inexact(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_inexact, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and abs(value) >= INEXACT


def _exact(number: float) -> int:
    """The integer that a large number of a schema is. Raises ValueError if it may have been written differently."""
    written = Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
    if isinstance(number, float) and (
        not math.isfinite(number) or number != written or len(written.normalize().as_tuple().digits) > FLOAT_DIGITS
    ):
        raise ValueError(f"the number {number!r} is not exact as a double: write it without a fraction and an exponent")
    if written.adjusted() >= MAX_DIGITS:
        raise ValueError(f"an integer has {written.adjusted() + 1} digits, but at most {MAX_DIGITS} are supported")
    return int(written)


def _fraction(number: float) -> Fraction:
    return Fraction(_exact(number)) if _has_inexact(number) else Fraction(repr(number))


def _bound(bounds: Schema, ending: str, closest: Any) -> tuple[Fraction | None, bool]:
    """The lower or upper bound of numbers, and whether it is one of them."""
    inclusive, exclusive = bounds.get("m" + ending), bounds.get("exclusiveM" + ending)
    if isinstance(exclusive, bool):  # Draft 4.
        inclusive, exclusive = (None, inclusive) if exclusive else (inclusive, None)
    given = [(_fraction(each), has) for each, has in ((inclusive, True), (exclusive, False)) if each is not None]
    if not given:
        return None, True
    bound = closest(value for value, _ in given)
    return bound, all(is_inclusive for value, is_inclusive in given if value == bound)


def _permits(rest: Schema, number: float) -> bool:
    """Whether the type and the bounds of a schema permit a number."""
    value, types = _fraction(number), declared_types(rest)
    if types and "number" not in types and not ("integer" in types and value.denominator == 1):
        return False
    low, has_low = _bound(rest, "inimum", max)
    high, has_high = _bound(rest, "aximum", min)
    step = _step(rest)
    return not (
        (low is not None and (value < low or (value == low and not has_low)))
        or (high is not None and (value > high or (value == high and not has_high)))
        or (step is not None and value % step)
    )


def _step(bounds: Schema) -> Fraction | None:
    step = bounds.get("multipleOf")
    if step is not None and not (size := _fraction(step)) > 0:
        raise ValueError(f"multipleOf must be greater than 0, got {step}")
    return None if step is None else size


def _multiples(first: int | None, last: int | None, size: Fraction) -> str:
    if size.denominator > 1 or first is None or last is None or (last - first) // size > MAX_MULTIPLES:
        raise ValueError(
            f"multipleOf with a number above 2**53 needs integers between bounds with at most {MAX_MULTIPLES} of them"
        )
    found = range(first + -first % int(size), last + 1, int(size))
    if not found:
        raise ValueError(f"no multiple of {size} is between {first} and {last}")
    return " | ".join(f'"{number}"' for number in found)


def _constant(value: Any) -> dict[str, Any]:
    """A schema of the parts of a constant list or object."""
    if isinstance(value, list):
        items = [{"const": each} for each in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    parts = {key: {"const": each} for key, each in value.items()}
    return {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}


def _are_disjoint(options: list[Any]) -> bool:
    """Whether no value can match two options, by their types or their constants."""
    seen: set[Any] = set()
    for option in options:
        constants = [option["const"]] if "const" in option else option.get("enum")
        kinds = declared_types(option) if constants is None else constants
        kinds = ["number" if kind == "integer" and constants is None else kind for kind in kinds]
        keys = set(map(hashable, kinds))
        if not keys or keys & seen:
            return False
        seen |= keys
    return all("const" in option or "enum" in option for option in options) or not any(
        "const" in option or "enum" in option for option in options
    )


def _narrowed(part: Any) -> Any:
    """A copy of a schema with each inexact bound of integers moved to the next double within it. Raises ValueError if
    there are other inexact numbers."""
    if isinstance(part, list):
        return [_narrowed(each) for each in part]
    if not isinstance(part, dict):
        return part
    copied = {key: value if key in ("const", "enum") else _narrowed(value) for key, value in part.items()}
    own = {key: copied[key] for key in NUMERIC if isinstance(copied.get(key), int | float)}
    if _has_inexact([*own.values(), copied.get("const"), copied.get("enum")]):
        others = [own.get("multipleOf"), copied.get("const"), copied.get("enum")]
        if declared_types(copied) != ["integer"] or _has_inexact(others):
            raise ValueError("only bounds of integers can be narrowed")
        low, high = _integer_bounds(own)
        if low is not None and high is not None and low > high:
            raise ValueError("no integer is between the bounds")
        step = {"multipleOf": own["multipleOf"]} if "multipleOf" in own else {}
        copied = {key: value for key, value in copied.items() if key not in NUMERIC} | step
        copied |= {} if low is None else {"minimum": -_double_below(-low)}
        copied |= {} if high is None else {"maximum": _double_below(high)}
    return copied


def _double_below(number: int) -> int:
    """The largest integer up to `number` that llguidance reads exactly."""
    double = float(min(number, LARGEST))
    return int(double if double <= number else math.nextafter(double, -math.inf))


def _integer_bounds(bounds: Schema) -> tuple[int | None, int | None]:
    low, has_low = _bound(bounds, "inimum", max)
    high, has_high = _bound(bounds, "aximum", min)
    return (
        None if low is None else math.ceil(low) if has_low else math.floor(low) + 1,
        None if high is None else math.floor(high) if has_high else math.ceil(high) - 1,
    )


def _quoted(name: str) -> str:
    """A name of a property in JSON, as a string of Lark."""
    return json.dumps(json.dumps(name, ensure_ascii=False))


def _pattern(text: str) -> str:
    escaped = re.sub(r"(?<!\\)/", r"\\/", text)
    return f"/{escaped}/"
