"""Whether one signature can stand for another: every call that the base takes must be taken."""

from __future__ import annotations

from inspect import Parameter, Signature

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def mismatches(base: Signature, override: Signature) -> list[str]:
    """Why ``override`` cannot be called like ``base``; empty when it can.

    Both are signatures of plain methods: the first parameter, self, is not compared.
    """
    wanted = list(base.parameters.values())[1:]
    given = list(override.parameters.values())[1:]
    positional = [parameter for parameter in given if parameter.kind in POSITIONAL]
    named = {parameter.name: parameter for parameter in given if parameter.kind in KEYWORD}
    kinds = {parameter.kind for parameter in given}
    takes_more = Parameter.VAR_POSITIONAL in kinds
    takes_any_name = Parameter.VAR_KEYWORD in kinds

    reasons = []
    matched: set[str] = set()
    for position, parameter in enumerate(wanted):
        name = parameter.name
        if parameter.kind in VARIADIC:
            if parameter.kind not in kinds:
                reasons.append(f"{parameter} is missing")
            continue
        here = positional[position] if position < len(positional) else None
        by_name = named.get(name)
        reason = None
        if parameter.kind in POSITIONAL and here is None and not takes_more:
            reason = f"parameter {name!r} is missing at position {position + 1}"
        elif parameter.kind in KEYWORD and by_name is None and not takes_any_name:
            reason = f"parameter {name!r} is missing or renamed"
        elif parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and here is not by_name:
            reason = f"parameter {name!r} is not the one at position {position + 1}"
        if reason is not None:
            reasons.append(reason)
        for taken in (here if parameter.kind in POSITIONAL else None, by_name):
            if taken is not None:
                matched.add(taken.name)
                if parameter.default is not Parameter.empty and taken.default is Parameter.empty:
                    reasons.append(f"parameter {taken.name!r} has lost its default")
    reasons += [
        f"extra parameter {parameter.name!r} has no default"
        for parameter in given
        if parameter.kind not in VARIADIC
        and parameter.name not in matched
        and parameter.default is Parameter.empty
    ]
    return list(dict.fromkeys(reasons))
