{{- define "nodefabric.fullname" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "nodefabric.selector" -}}
app.kubernetes.io/name: nodefabric
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nodefabric.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "nodefabric.kubeletDir" -}}
{{ .Values.config.kubeletDir | default "/var/lib/kubelet" }}
{{- end -}}

{{- define "nodefabric.stateDir" -}}
{{ .Values.config.stateDir | default "/var/lib/nodefabric" }}
{{- end -}}

{{- define "nodefabric.runDir" -}}
{{ .Values.config.runDir | default "/run/nodefabric" }}
{{- end -}}

{{- define "nodefabric.kubeletConfig" -}}
{{ (.Values.config.topology).kubeletConfig | default "/var/lib/kubelet/config.yaml" }}
{{- end -}}

{{- define "nodefabric.port" -}}
{{- if and (hasKey (.Values.config.endpoints | default dict) "port") (eq (toString .Values.config.endpoints.port) "0") -}}
{{- fail "config.endpoints.port: 0 is another port at each start, which nobody finds: name one, for example 9808" -}}
{{- end -}}
{{ (.Values.config.endpoints).port | default 9808 }}
{{- end -}}

{{- /* Where kubelet's probes ask the agent: in the pod's own shared memory, which nobody else on the host sees. */ -}}
{{- define "nodefabric.probeSocket" -}}
/dev/shm/nodefabric-probe.sock
{{- end -}}

{{- /* Whether the agent talks to the API server at all: "yes", or nothing. */ -}}
{{- define "nodefabric.publishes" -}}
{{- if (.Values.config.topology).publish -}}yes{{- end -}}
{{- end -}}

{{- define "nodefabric.cdiDir" -}}
{{ .Values.config.cdiDir | default "/var/run/cdi" }}
{{- end -}}

{{- /* Whether the agent writes CDI specs: for network devices, unless they go by their paths, for claims, for pools. */ -}}
{{- define "nodefabric.writesCdi" -}}
{{- $byPaths := eq (toString .Values.config.cdiNames) "false" -}}
{{- range .Values.config.resources -}}
{{- if and (ne .kind "gpu") (or (not $byPaths) (eq (.binding | default "early") "late")) -}}yes{{- break -}}{{- end -}}
{{- end -}}
{{- if or (include "nodefabric.servesClaims" .) .Values.replacedConfigs.useCdi -}}yes{{- end -}}
{{- end -}}

{{- /* Whether a pod's interface may be told something that is a file: settings of IPv6. */ -}}
{{- define "nodefabric.writesSysctls" -}}
{{- if .Values.writableSysctls -}}yes{{- end -}}
{{- range .Values.config.networks -}}{{- if pick (.sysctls | default dict) "accept_ra" "autoconf" "disable_ipv6" -}}yes{{- break -}}{{- end -}}{{- end -}}
{{- end -}}

{{- /* Whether a resource is handed out by claims (DRA). */ -}}
{{- define "nodefabric.offersDra" -}}
{{- range .Values.config.resources -}}{{- if eq (.offer | default "devicePlugin") "dra" -}}yes{{- break -}}{{- end -}}{{- end -}}
{{- end -}}

{{- /* Whether the agent serves claims: those that are prepared are to end, too. */ -}}
{{- define "nodefabric.servesClaims" -}}
{{- if or (include "nodefabric.offersDra" .) .Values.keepClaims -}}yes{{- end -}}
{{- end -}}

{{- define "nodefabric.draDriver" -}}
{{ (.Values.config.dra).driver | default "nodefabric.io" }}
{{- end -}}

{{- /* Whether a claim's pods are looked up: which containers name it, or which GPUs they have. */ -}}
{{- define "nodefabric.readsClaimants" -}}
{{- range .Values.config.resources -}}
{{- if and (eq (.offer | default "devicePlugin") "dra") (or .environment (eq (.binding | default "early") "late")) -}}yes{{- break -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What a resource is called as a DeviceClass: rdma/vf is rdma-vf. */ -}}
{{- define "nodefabric.className" -}}
{{ .name | lower | replace "/" "-" | replace "_" "-" }}
{{- end -}}

{{- /* What the configuration has the agent do at the API server; each is "yes", or nothing. */ -}}
{{- define "nodefabric.publishesVolcano" -}}
{{- if (.Values.config.topology).volcano -}}yes{{- end -}}
{{- end -}}

{{- /* Only what is published needs it: a pod does not start where a file of its mounts is missing. */ -}}
{{- define "nodefabric.readsKubeletConfig" -}}
{{- if or (include "nodefabric.publishes" .) (include "nodefabric.publishesVolcano" .) -}}yes{{- end -}}
{{- end -}}

{{- define "nodefabric.writesNode" -}}
{{- $topology := .Values.config.topology | default dict -}}
{{- if or ($topology.labels).keys ($topology.bandwidth).annotation -}}yes{{- end -}}
{{- end -}}

{{- define "nodefabric.watchesPods" -}}
{{- $topology := .Values.config.topology | default dict -}}
{{- if and $topology.publish (ne (($topology.fingerprint).pods | default "dedicated") "podresources") -}}yes{{- end -}}
{{- end -}}

{{- /* Whether the agent taints its own Node while it restarts. */ -}}
{{- define "nodefabric.taints" -}}
{{- if (.Values.config.restart).taint -}}yes{{- end -}}
{{- end -}}

{{- define "nodefabric.taintKey" -}}
nodefabric.io/agent-not-ready
{{- end -}}

{{- define "nodefabric.needsApi" -}}
{{- if or (include "nodefabric.publishes" .) (include "nodefabric.publishesVolcano" .) (include "nodefabric.writesNode" .) (include "nodefabric.taints" .) (include "nodefabric.servesClaims" .) -}}yes{{- end -}}
{{- end -}}

{{- /* Whether a label comes from what the switches say in LLDP frames. */ -}}
{{- define "nodefabric.hearsLldp" -}}
{{- range ((.Values.config.topology).labels).keys -}}
{{- $fact := . -}}
{{- if kindIs "map" . -}}{{- $fact = .fact -}}{{- end -}}
{{- if has $fact (list "leaf-switch" "leaf-chassis" "leaf-port") -}}yes{{- break -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The files of which labels take their values, one a line. */ -}}
{{- define "nodefabric.labelFiles" -}}
{{- range ((.Values.config.topology).labels).keys -}}
{{- if kindIs "map" . -}}{{- with .path }}{{ . }}
{{ end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Regular expressions of the keys that the agent may set at its own Node, for the admission policy. */ -}}
{{- define "nodefabric.ownLabels" -}}
{{- $found := list -}}
{{- range $key, $fact := ((.Values.config.topology).labels).keys -}}
{{- $found = append $found ($key | replace "." "[.]" | replace "{nic}" "[0-9a-f]{4,8}-[0-9a-f]{2}-[0-9a-f]{2}[.][0-7]" | replace "{rail}" "[0-9]+" | replace "{plane}" "[0-9]+") -}}
{{- end -}}
"^({{ join "|" $found }})$"
{{- end -}}

{{- define "nodefabric.ownAnnotations" -}}
"^({{ ((.Values.config.topology).bandwidth).annotation | default "" | replace "." "[.]" }})$"
{{- end -}}

{{- /* The folders of IPAM plugins' configuration, one a line: kubeconfigs of other plugins lie beside them. */ -}}
{{- define "nodefabric.ipamFolders" -}}
{{- $known := dict "whereabouts" "whereabouts.d" "nv-ipam" "nv-ipam.d" -}}
{{- range concat (.Values.config.networks | default list) .Values.networkAttachments -}}
{{- range list .ipam (.config).ipam -}}
{{- if kindIs "map" . -}}{{- with get $known (toString .type) }}{{ . }}
{{ end -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.cni.ipamFolders }}{{ . }}
{{ end -}}
{{- end -}}

{{- /* What one part of the configuration says of another; the agent would refuse it too, but after the upgrade. */ -}}
{{- define "nodefabric.checkNetworks" -}}
{{- $names := list -}}
{{- range .Values.config.networks -}}{{- $names = append $names .name -}}{{- end -}}
{{- range $i, $resource := .Values.config.resources -}}
{{- $named := list -}}
{{- if kindIs "map" $resource.network -}}
{{- $named = values $resource.network -}}
{{- else if $resource.network -}}
{{- $named = list $resource.network -}}
{{- end -}}
{{- range $network := $named -}}
{{- if not (has $network $names) -}}
{{- fail (printf "config.resources[%d].network: %q is not among config.networks (%s)" $i $network (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The API server takes one of the two only (apps/v1, RollingUpdateDaemonSet). */ -}}
{{- define "nodefabric.checkUpdates" -}}
{{- $none := list "0" "0%" -}}
{{- $strategy := .Values.updateStrategy | default dict -}}
{{- $surges := not (has (toString ($strategy.maxSurge | default 0)) $none) -}}
{{- $ends := not (has (toString ($strategy.maxUnavailable | default 0)) $none) -}}
{{- if and $surges $ends -}}
{{- fail "updateStrategy: one of maxSurge and maxUnavailable must be 0: set maxSurge: 0 as well to end each agent before the next one starts" -}}
{{- else if not (or $surges $ends) -}}
{{- fail "updateStrategy: maxSurge and maxUnavailable are both 0, so no agent would ever be updated" -}}
{{- end -}}
{{- end -}}
