{{/* Names, labels and small decisions that several objects share. */}}

{{- define "sglang-ext.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Room is left for suffixes: names of pods of a LeaderWorkerSet are labels too, at most 63 characters. */}}
{{- define "sglang-ext.fullname" -}}
{{- $name := include "sglang-ext.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "sglang-ext.instance" -}}
app.kubernetes.io/name: {{ include "sglang-ext.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Pods that answer requests: those of the Deployment, and the leaders of a LeaderWorkerSet. */}}
{{- define "sglang-ext.selector" -}}
{{ include "sglang-ext.instance" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "sglang-ext.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "sglang-ext.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
track: {{ .Values.track }}
{{- end }}

{{- define "sglang-ext.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{- define "sglang-ext.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "sglang-ext.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "sglang-ext.modelName" -}}
{{ default .Values.model.path .Values.model.servedName }}
{{- end }}

{{/* Most endpoints there can be at once. */}}
{{- define "sglang-ext.mostReplicas" -}}
{{- if eq .Values.autoscaling.kind "none" -}}
{{ int .Values.replicas }}
{{- else -}}
{{ int .Values.autoscaling.maxReplicas }}
{{- end -}}
{{- end }}

{{/* A value as a word: numbers of YAML are floats to helm, and 1048576 must not become 1.048576e+06. */}}
{{- define "sglang-ext.word" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{ int64 . }}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end }}

{{/* The algorithm an operator expects; empty where only the drafter can tell. */}}
{{- define "sglang-ext.expectedMethod" -}}
{{- $s := .Values.speculative -}}
{{- if not $s.draft -}}
NONE
{{- else if eq $s.method "none" -}}
{{ upper $s.family }}
{{- else if eq $s.method "carryover" -}}
CARRYOVER_{{ upper $s.family }}
{{- else if ne $s.method "auto" -}}
{{ upper $s.method }}
{{- end -}}
{{- end }}

{{/* Attention backend of the drafter: the profile names one where drafts with carried rows need it. */}}
{{- define "sglang-ext.draftAttentionBackend" -}}
{{- $s := .Values.speculative -}}
{{- $profile := get .Values.gpu.profiles .Values.gpu.profile -}}
{{- if $s.draftAttentionBackend -}}
{{ $s.draftAttentionBackend }}
{{- else if and $s.draft (not (has $s.method (list "none" "ready"))) -}}
{{ $profile.draftAttentionBackend }}
{{- end -}}
{{- end }}

{{- define "sglang-ext.workload" -}}
{{- if gt (int .Values.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "sglang-ext.fullname" . }}
{{- end }}

{{/* Matchers of this release's servers in Prometheus: the labels that a monitor of this chart adds, and the model. */}}
{{- define "sglang-ext.matchers" -}}
job="sglang-ext",namespace={{ .Release.Namespace | quote }},release={{ .Release.Name | quote }},model_name={{ include "sglang-ext.modelName" . | quote }}
{{- end }}

{{- define "sglang-ext.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.security.readOnlyRootFilesystem }}
capabilities:
  drop: [ALL]
  {{- with .Values.security.addCapabilities }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{/* Downloads and the test need nothing of their own. */}}
{{- define "sglang-ext.helperSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "sglang-ext.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.security.uid }}
runAsGroup: {{ int64 .Values.security.uid }}
fsGroup: {{ int64 .Values.security.uid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "sglang-ext.apiKeyEnv" -}}
{{- with .Values.auth.existingSecret }}
- name: SGLANG_EXT_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.auth.apiKey }}
{{- end }}
{{- end }}
