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
from google.protobuf import descriptor_pb2, descriptor_pool, struct_pb2

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
_REFERENCE, _SPEC = {"kind": "string", "name": "string"}, {"taints": "google.protobuf.ListValue"}
_METADATA = {
    **dict.fromkeys(("labels", "annotations"), "google.protobuf.Struct"),
    **dict.fromkeys(("finalizers", "ownerReferences"), "google.protobuf.ListValue"),
    "name": "string",
}
TYPED: Mapping[str, Mapping[str, str]] = {
    "Reference": _REFERENCE,
    "Spec": _SPEC,
    "Metadata": _METADATA,
    "Node": {"metadata": "k8s.Metadata", "spec": "k8s.Spec"},
    "Event": {"metadata": "k8s.Metadata", "involvedObject": "k8s.Reference"},
    "ResourceSlice": {"metadata": "k8s.Metadata", "spec": "google.protobuf.Struct"},
    "ResourceClaim": dict.fromkeys(("spec", "status"), "google.protobuf.Struct") | {"metadata": "k8s.Metadata"},
}
"""What of the kinds that are built into the API server the policy may name: for status.typeChecking it compiles each
expression once more, with `object` of each of these types (pkg/admission/plugin/policy/validating/typechecking.go)."""
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

    def type_of(self, variable: str) -> str:
        """Tell what the type checker found a variable to be."""
        return str(self._env.compile(self._variables[variable]).return_type().name())

    def warnings(self, kind: str) -> tuple[str, ...]:
        """Return what the API server would say in status.typeChecking of objects of a kind in TYPED."""
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
        pool.AddSerializedFile(_typed_file().SerializeToString())
        typed = DECLARED | dict.fromkeys(("object", "oldObject"), _T(f"k8s.{kind}"))
        env = cel.NewEnv(descriptor_pool=pool, variables=typed, extensions=[make() for make in _EXTENSIONS])
        found = []
        for validation in self._spec["validations"]:
            for text in (validation["expression"], validation.get("messageExpression")):
                if text is not None:
                    try:
                        env.compile(self._composed(text))
                    except RuntimeError as error:
                        found.append(f"{text}: {error}")
        return tuple(found)

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


def _typed_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="k8s.proto", package="k8s", syntax="proto3", dependency=["google/protobuf/struct.proto"]
    )
    field = descriptor_pb2.FieldDescriptorProto
    for name, fields in TYPED.items():
        message = file.message_type.add(name=name)
        for number, (key, kind) in enumerate(fields.items(), 1):
            how = {"type": field.TYPE_STRING} if kind == "string" else {"type": field.TYPE_MESSAGE}
            named = {} if kind == "string" else {"type_name": f".{kind}"}
            message.field.add(name=key, number=number, label=field.LABEL_OPTIONAL, **how, **named)
    return file


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
