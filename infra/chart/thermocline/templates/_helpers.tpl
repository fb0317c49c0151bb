{{/* Start of all names: at most 30 characters. What is cut ends with a digest of the whole, so that two long names stay two. */}}
{{- define "thermocline.fullname" -}}
{{- $name := default .Release.Name .Values.fullnameOverride | replace "." "-" -}}
{{- if gt (len $name) 30 -}}
{{- $name = printf "%s-%s" ($name | trunc 23 | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "thermocline.selector" -}}
app.kubernetes.io/name: thermocline
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
thermocline/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "thermocline.labels" -}}
{{ include "thermocline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "thermocline.image" -}}
{{ printf "%s/thermocline-%s:%s%s" .root.Values.image.registry .process (default .root.Chart.AppVersion .root.Values.image.tag) .suffix | quote }}
{{- end -}}

{{/* What every pod says: no token of the API server, no root, no privilege. */}}
{{- define "thermocline.pod" -}}
serviceAccountName: {{ default (include "thermocline.fullname" .) .Values.serviceAccount.name | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{/* Labels and annotations that the values give to every pod; the schema refuses those of the chart. */}}
{{- define "thermocline.podLabels" -}}
{{ include "thermocline.labels" . }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "thermocline.podAnnotations" -}}
checksum/settings: {{ toJson .settings | sha256sum }}
{{- with .root.Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "thermocline.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/*
The values' variables, then where the broker is and who this process is: of two with one name, the last counts. What is secret comes from secrets, as variables
or as files.
*/}}
{{- define "thermocline.env" -}}
{{- $broker := .root.Values.broker -}}
{{- $urls := list -}}
{{- range $broker.servers -}}
{{- $urls = append $urls (printf "%s://%s" $broker.scheme .) -}}
{{- end -}}
{{- with .root.Values.env }}
{{- toYaml . }}
{{ end -}}
- name: THERMOCLINE_NATS
  value: {{ join "," $urls | quote }}
{{- if $broker.credentials.secretName }}
- name: THERMOCLINE_NATS_CREDENTIALS
  value: /etc/thermocline-broker/user.creds
{{- else }}
- name: THERMOCLINE_NATS_USER
  value: {{ ternary .process $broker.user $broker.perProcess | quote }}
- name: THERMOCLINE_NATS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $broker.secretName | quote }}
      key: {{ ternary .process $broker.secretKey $broker.perProcess | quote }}
{{- end }}
{{- with $broker.tls }}
{{- if .secretName }}
- name: THERMOCLINE_NATS_CA
  value: /etc/thermocline-broker/ca.crt
{{- if .clientCertificate }}
- name: THERMOCLINE_NATS_CERT
  value: /etc/thermocline-broker/tls.crt
- name: THERMOCLINE_NATS_KEY
  value: /etc/thermocline-broker/tls.key
{{- end }}
{{- end }}
{{- with .serverName }}
- name: THERMOCLINE_NATS_SERVER_NAME
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Files about the broker: whole volumes, so that kubelet replaces what is rotated, and the next connection reads it. */}}
{{- define "thermocline.brokerMount" -}}
{{- if or .Values.broker.tls.secretName .Values.broker.credentials.secretName }}
- name: broker
  mountPath: /etc/thermocline-broker
  readOnly: true
{{- end }}
{{- end -}}

{{- define "thermocline.brokerVolume" -}}
{{- if or .Values.broker.tls.secretName .Values.broker.credentials.secretName }}
- name: broker
  projected:
    defaultMode: 0440
    sources:
      {{- with .Values.broker.tls }}
      {{- if .secretName }}
      - secret:
          name: {{ .secretName | quote }}
          items:
            - {key: ca.crt, path: ca.crt}
            {{- if .clientCertificate }}
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- end }}
      {{- end }}
      {{- end }}
      {{- with .Values.broker.credentials }}
      {{- if .secretName }}
      - secret:
          name: {{ .secretName | quote }}
          items:
            - {key: {{ .secretKey | quote }}, path: user.creds}
      {{- end }}
      {{- end }}
{{- end }}
{{- end -}}

{{/* The port of the API, named for what is spoken there. */}}
{{- define "thermocline.apiPort" -}}
{{- ternary "https" "http" (ne .Values.gateway.tls.secretName "") -}}
{{- end -}}

{{/* Its number in the container; the service has gateway.service.port. */}}
{{- define "thermocline.apiPortNumber" -}}
8000
{{- end -}}

{{- define "thermocline.modelMount" -}}
{{- if .Values.model.volume }}
- name: models
  mountPath: {{ .Values.model.mountPath | quote }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "thermocline.modelVolume" -}}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What a process may write to, and its settings. */}}
{{- define "thermocline.commonMounts" -}}
- name: settings
  mountPath: /etc/thermocline
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- with include "thermocline.brokerMount" . }}
{{ trim . }}
{{- end }}
{{- end -}}

{{- define "thermocline.commonVolumes" -}}
- name: settings
  configMap:
    name: {{ include "thermocline.fullname" . | quote }}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir: {}
{{- with include "thermocline.brokerVolume" . }}
{{ trim . }}
{{- end }}
{{- end -}}

{{/* A process without an API serves /metrics and nothing else. */}}
{{- define "thermocline.metricsProbes" -}}
startupProbe:
  httpGet: {path: /metrics, port: {{ int . }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /metrics, port: {{ int . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Ready once the cell lists the process: a rolling update goes on to the next pod when a worker has loaded its model. */}}
{{- define "thermocline.memberProbes" -}}
{{ include "thermocline.metricsProbes" . }}
readinessProbe:
  httpGet: {path: /health/ready, port: {{ int . }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* Memory is limited to what is requested: a cache that is killed for its neighbours' sake serves nobody. */}}
{{- define "thermocline.resources" -}}
requests:
  cpu: {{ .cpuRequest | quote }}
  memory: {{ int .memoryMib }}Mi
limits:
  memory: {{ int .memoryMib }}Mi
  {{- with .cpuLimit }}
  cpu: {{ . | quote }}
  {{- end }}
{{- end -}}

{{/* Spread over machines, then over zones, as far as there are any. */}}
{{- define "thermocline.spread" -}}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "thermocline.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{- define "thermocline.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A pool with its defaults filled in, as JSON. */}}
{{- define "thermocline.pool" -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.poolDefaults) .pool -}}
{{- toJson $pool -}}
{{- end -}}

{{/* Pods that read one another's host memory by one engine. */}}
{{- define "thermocline.sharing" -}}
app.kubernetes.io/name: thermocline
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
thermocline/shares: {{ .engine }}
{{- end -}}

{{/* Pods of the servers that this chart installs. */}}
{{- define "thermocline.natsSelector" -}}
app.kubernetes.io/name: nats
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
