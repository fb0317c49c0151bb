{{/* Values that render but cannot be installed are refused here, with words that say what to change. */}}
{{- define "thermocline.checks" -}}
{{- include "thermocline.checkNames" . -}}
{{- include "thermocline.checkSettings" . -}}
{{- include "thermocline.checkGateway" . -}}
{{- include "thermocline.checkCpus" (dict "path" "gateway.resources" "resources" .Values.gateway.resources) -}}
{{- include "thermocline.checkCpus" (dict "path" "scheduler.resources" "resources" .Values.scheduler.resources) -}}
{{- range $given := .Values.pools -}}
{{- include "thermocline.checkPool" (dict "root" $ "pool" (include "thermocline.pool" (dict "root" $ "pool" $given) | fromJson)) -}}
{{- end -}}
{{- end -}}

{{/* Names of services are labels of DNS-1035, which begin with a letter. */}}
{{- define "thermocline.checkNames" -}}
{{- $name := include "thermocline.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "release %s: names of services begin with a letter; choose another name or set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .Values.pools -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "pools: two have the name %s" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- end -}}

{{/* A table may stand in the settings file once. */}}
{{- define "thermocline.checkSettings" -}}
{{- range $process := list "gateway" "scheduler" "storage" "worker" -}}
{{- if and (hasKey $.Values.settings.common $process) (index $.Values.settings $process) -}}
{{- fail (printf "settings.common.%s and settings.%s are the same table of the settings file: move both to settings.%s" $process $process $process) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "thermocline.checkGateway" -}}
{{- with .Values.gateway -}}
{{- if and (eq .apiMetrics "admin") (not .adminKey.secretName) -}}
{{- fail "gateway.apiMetrics: admin needs the key of gateway.adminKey" -}}
{{- end -}}
{{- if eq (int .metricsPort) (include "thermocline.apiPortNumber" . | int) -}}
{{- fail (printf "gateway.metricsPort: %d is the port of the API in the container" (int .metricsPort)) -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- fail "gateway.autoscaling: minReplicas is above maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "thermocline.checkCpus" -}}
{{- if .resources.cpuLimit -}}
{{- $request := include "thermocline.millicpus" .resources.cpuRequest | float64 -}}
{{- $limit := include "thermocline.millicpus" .resources.cpuLimit | float64 -}}
{{- if gt $request $limit -}}
{{- fail (printf "%s: cpuRequest %v is above cpuLimit %v" .path .resources.cpuRequest .resources.cpuLimit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "thermocline.millicpus" -}}
{{- $cpus := toString . -}}
{{- if hasSuffix "m" $cpus -}}
{{- trimSuffix "m" $cpus -}}
{{- else -}}
{{- mulf 1000 (float64 $cpus) -}}
{{- end -}}
{{- end -}}

{{- define "thermocline.checkPool" -}}
{{- $pool := .pool -}}
{{- if and (eq $pool.device "cuda") (ne (int $pool.workers) 1) -}}
{{- fail (printf "pool %s: a pod with CUDA has one worker, because it claims the GPUs of one" $pool.name) -}}
{{- end -}}
{{- if and (eq $pool.device "cuda") (eq $pool.gpu.sharing "claim") (semverCompare "<1.34.0-0" (default .root.Capabilities.KubeVersion.Version .root.Values.kubeVersion)) -}}
{{- fail (printf "pool %s: claiming a GPU for a pod needs Kubernetes 1.34; set gpu.sharing to visible on machines with as many GPUs as a worker takes" $pool.name) -}}
{{- end -}}
{{- if and $pool.disk.enabled (gt (int $pool.disk.kvGib) (int $pool.disk.claimGib)) -}}
{{- fail (printf "pool %s: disk.kvGib is more than disk.claimGib holds" $pool.name) -}}
{{- end -}}
{{- if gt (int $pool.share.firstPort) (int $pool.share.lastPort) -}}
{{- fail (printf "pool %s: share.firstPort is above share.lastPort" $pool.name) -}}
{{- end -}}
{{- if and (ne $pool.autoscaling.kind "none") (gt (int $pool.autoscaling.minReplicas) (int $pool.autoscaling.maxReplicas)) -}}
{{- fail (printf "pool %s: autoscaling.minReplicas is above autoscaling.maxReplicas" $pool.name) -}}
{{- end -}}
{{- include "thermocline.checkClaim" . -}}
{{- end -}}

{{/*
Claims of a StatefulSet cannot be changed, and Kubernetes says only that. Where Helm does not ask a cluster (helm template,
helm lint) there is no live StatefulSet, and so no complaint.
*/}}
{{- define "thermocline.checkClaim" -}}
{{- $name := printf "%s-%s" (include "thermocline.fullname" .root) .pool.name -}}
{{- $live := lookup "apps/v1" "StatefulSet" .root.Release.Namespace $name -}}
{{- if $live -}}
{{- $is := "no claim" -}}
{{- range $live.spec.volumeClaimTemplates -}}
{{- $is = include "thermocline.claim" (dict "gib" (include "thermocline.gib" .spec.resources.requests.storage) "class" .spec.storageClassName) -}}
{{- end -}}
{{- $wanted := "no claim" -}}
{{- if .pool.disk.enabled -}}
{{- $wanted = include "thermocline.claim" (dict "gib" (int .pool.disk.claimGib | toString) "class" .pool.disk.storageClassName) -}}
{{- end -}}
{{- if ne $is $wanted -}}
{{- fail (printf "pool %s: its StatefulSet %s has %s and the values want %s, which Kubernetes does not change in place; docs/how-to/kubernetes.md#change-the-disk-of-a-pool says how" .pool.name $name $is $wanted) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "thermocline.claim" -}}
claims of {{ .gib }} GiB of {{ with .class }}class {{ . }}{{ else }}the default class{{ end }}
{{- end -}}

{{/* A quantity in GiB, as text. The API server writes 1024Gi as 1Ti; what is written otherwise is left as it is. */}}
{{- define "thermocline.gib" -}}
{{- $factors := dict "Gi" 1 "Ti" 1024 "Pi" 1048576 -}}
{{- $suffix := . | trunc -2 -}}
{{- if hasKey $factors $suffix -}}
{{- mul (. | trimSuffix $suffix | int64) (get $factors $suffix) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}
