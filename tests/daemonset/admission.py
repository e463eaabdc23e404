"""Evaluates a ValidatingAdmissionPolicy as the API server does, with Google's own CEL runtime.

What is here is of k8s.io/apiserver: rules match as in pkg/admission/plugin/webhook/predicates/rules, conditions as in
pkg/admission/plugin/webhook/matchconditions, variables are composited lazily, an error counts as failurePolicy says.
The variables of expressions are declared with the types that the API server gives them; `object` and `oldObject` are
dynamic there too (https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from tests.daemonset.manifests import Document

_T = cel.Type
DECLARED = {
    "request.operation": _T.STRING,
    "request.resource.group": _T.STRING,
    "request.resource.version": _T.STRING,
    "request.resource.resource": _T.STRING,
    "request.userInfo.username": _T.STRING,
    "request.userInfo": _T.Map(_T.STRING, _T.Map(_T.STRING, _T.List(_T.STRING))),  # extra alone, and only if it has any
    "object": _T.DYN,
    "oldObject": _T.DYN,
}
_EXTENSIONS = (ext_optional.ExtOptional, ext_strings.ExtStrings)
KNOWN_SPEC = {"failurePolicy", "matchConstraints", "matchConditions", "variables", "validations"}
_VARIABLE = re.compile(r"\bvariables\.([A-Za-z_]\w*)")


class EvaluationFailed(Exception):
    """An expression has no value for this request."""


@dataclass(frozen=True, slots=True)
class Request:
    """What of an AdmissionReview's request a policy can see."""

    operation: str
    group: str
    version: str
    resource: str
    username: str
    extra: Mapping[str, list[str]]
    object: Document | None
    old_object: Document | None = None
    subresource: str = ""

    @property
    def bindings(self) -> dict[str, Any]:
        """The values of the declared variables."""
        return {
            "request.operation": self.operation,
            "request.resource.group": self.group,
            "request.resource.version": self.version,
            "request.resource.resource": self.resource,
            "request.userInfo.username": self.username,
            "request.userInfo": {"extra": dict(self.extra)} if self.extra else {},
            "object": self.object,
            "oldObject": self.old_object,
        }


@dataclass(frozen=True, slots=True)
class Denial:
    """One validation that did not hold."""

    message: str
    reason: str


class Policy:
    """One ValidatingAdmissionPolicy, every expression of which is compiled and type-checked."""

    def __init__(self, document: Document) -> None:
        spec = document["spec"]
        assert spec.keys() <= KNOWN_SPEC, spec.keys() - KNOWN_SPEC
        assert spec["matchConstraints"].keys() == {"resourceRules"}
        self._spec = spec
        self._fails = spec.get("failurePolicy", "Fail") == "Fail"
        self._env = cel.NewEnv(variables=DECLARED, extensions=[make() for make in _EXTENSIONS])
        self._variables: dict[str, str] = {}
        for variable in spec.get("variables", ()):
            text = self._composed(variable["expression"])
            self._env.compile(text)
            self._variables[variable["name"]] = text
        self._conditions = [self._compiled(c["expression"], "BOOL") for c in spec.get("matchConditions", ())]
        self._validations = [
            (
                validation,
                self._compiled(validation["expression"], "BOOL"),
                self._compiled(text, "STRING") if (text := validation.get("messageExpression")) else None,
            )
            for validation in spec["validations"]
        ]

    def denials(self, request: Request) -> tuple[Denial, ...] | None:
        """Return what speaks against a request; None if the policy does not look at it."""
        if not any(_matches(rule, request) for rule in self._spec["matchConstraints"]["resourceRules"]):
            return None
        results = [_outcome(condition, request) for condition in self._conditions]
        if False in results:
            return None
        if any(isinstance(result, EvaluationFailed) for result in results):
            return (Denial("a condition failed", "Invalid"),) if self._fails else None
        found = []
        for validation, expression, message in self._validations:
            result = _outcome(expression, request)
            if isinstance(result, EvaluationFailed):
                if self._fails:
                    found.append(
                        Denial(f"expression '{validation['expression']}' resulted in error: {result}", "Invalid")
                    )
            elif result is not True:
                told = _outcome(message, request) if message is not None else ""
                plain = told if isinstance(told, str) and told.strip() and "\n" not in told else ""
                fallback = validation.get("message") or f"failed expression: {validation['expression']}"
                found.append(Denial(plain.strip() or fallback, validation.get("reason", "Invalid")))
        return tuple(found)

    def _composed(self, text: str) -> str:
        """Put variables in by their expressions: they are evaluated where they are used, and fail there."""
        return _VARIABLE.sub(lambda match: f"({self._variables[match[1]]})", text)  # variables are composed already

    def _compiled(self, text: str, type_name: str) -> cel.Expression:
        expression = self._env.compile(self._composed(text))
        assert expression.return_type().name() == type_name, text
        return expression


def _outcome(expression: cel.Expression, request: Request) -> Any:
    value = expression.eval(data=request.bindings)
    if value.type() in (cel.Type.ERROR, cel.Type.UNKNOWN):
        return EvaluationFailed(str(value.plain_value()))
    return value.plain_value()


def _matches(rule: Document, request: Request) -> bool:
    def listed(key: str, value: str) -> bool:
        return "*" in rule[key] or value in rule[key]

    resource = f"{request.resource}/{request.subresource}" if request.subresource else request.resource
    return (
        listed("operations", request.operation)
        and listed("apiGroups", request.group)
        and listed("apiVersions", request.version)
        and resource in rule["resources"]
    )
