{{/* The pod of the server. Takes root (the chart's context) and role: server, or worker in a LeaderWorkerSet. */}}

{{- define "sglang-ext.args" -}}
{{- $v := .root.Values -}}
{{- $s := $v.speculative -}}
{{- $args := list $v.model.path -}}
{{- if $s.draft -}}
{{- $args = concat $args (list "--draft" $s.draft) -}}
{{- end -}}
{{- $args = concat $args (list "--method" $s.method "--host" "0.0.0.0" "--port" $v.server.port "--tp-size" (mul (int $v.gpu.count) (int $v.nodes)) "--enable-metrics") -}}
{{- range $pair := list
  (list "--revision" $v.model.revision)
  (list "--served-model-name" $v.model.servedName)
  (list "--speculative-draft-model-revision" $s.draftRevision)
  (list (printf "--speculative-%s-block-size" $s.family) $s.blockSize)
  (list "--speculative-draft-attention-backend" (include "sglang-ext.draftAttentionBackend" .root))
  (list "--speculative-accept-threshold-single" $s.thresholds.single)
  (list "--speculative-accept-threshold-acc" $s.thresholds.acc)
  (list "--context-length" $v.server.contextLength)
  (list "--mem-fraction-static" $v.server.memFractionStatic)
  (list "--max-running-requests" $v.server.maxRunningRequests)
  (list "--max-mamba-cache-size" $v.server.maxMambaCacheSize)
  (list "--mamba-full-memory-ratio" $v.server.mambaFullMemoryRatio)
-}}
{{- $value := last $pair -}}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) -}}
{{- $args = concat $args (list (first $pair) $value) -}}
{{- end -}}
{{- end -}}
{{- if $v.auth.existingSecret -}}
{{- $args = concat $args (list "--api-key" "$(SGLANG_EXT_API_KEY)") -}}
{{- end -}}
{{- if $v.auth.adminExistingSecret -}}
{{- $args = concat $args (list "--admin-api-key" "$(SGLANG_EXT_ADMIN_KEY)") -}}
{{- end -}}
{{- if gt (int $v.nodes) 1 -}}
{{- $args = concat $args (list "--nnodes" $v.nodes "--node-rank" "$(LWS_WORKER_INDEX)" "--dist-init-addr" "$(LWS_LEADER_ADDRESS):20000") -}}
{{- end -}}
{{- range concat $args $v.server.extraArgs }}
- {{ include "sglang-ext.word" . | quote }}
{{- end }}
{{- end }}

{{- define "sglang-ext.hubEnv" -}}
{{- if .Values.hub.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.hub.secretKey }}
{{- end }}
{{- end }}

{{- define "sglang-ext.env" -}}
{{- $v := .Values -}}
# Everything that is compiled goes below HOME or SGLANG_CACHE_DIR, so into the cache volume.
- name: HOME
  value: /cache
- name: SGLANG_CACHE_DIR
  value: /cache/sglang
- name: HF_HOME
  value: {{ $v.storage.models.mountPath }}/hub
{{- include "sglang-ext.hubEnv" . }}
{{- include "sglang-ext.apiKeyEnv" . }}
{{- with $v.auth.adminExistingSecret }}
- name: SGLANG_EXT_ADMIN_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $v.auth.adminKey }}
{{- end }}
{{- with include "sglang-ext.expectedMethod" . }}
- name: SGLANG_EXT_EXPECTED_METHOD
  value: {{ . }}
{{- end }}
{{- if not (kindIs "invalid" $v.speculative.carriedRows) }}
- name: SGLANG_EXT_CARRIED_ROWS
  value: {{ int $v.speculative.carriedRows | quote }}
{{- end }}
{{- range $name, $value := $v.speculative.env }}
- name: {{ $name }}
  value: {{ include "sglang-ext.word" $value | quote }}
{{- end }}
{{- with $v.server.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sglang-ext.resources" -}}
{{- $v := .Values -}}
{{- $profile := get $v.gpu.profiles $v.gpu.profile -}}
requests:
  cpu: {{ mul (int $profile.cpuPerGpu) (int $v.gpu.count) | quote }}
  memory: {{ mul (int $profile.memoryGiBPerGpu) (int $v.gpu.count) }}Gi
  {{ $profile.resource }}: {{ int $v.gpu.count | quote }}
  {{- range $name, $amount := $v.gpu.extraResources }}
  {{ $name }}: {{ include "sglang-ext.word" $amount | quote }}
  {{- end }}
limits:
  memory: {{ mul (int $profile.memoryGiBPerGpu) (int $v.gpu.count) }}Gi
  {{ $profile.resource }}: {{ int $v.gpu.count | quote }}
  {{- range $name, $amount := $v.gpu.extraResources }}
  {{ $name }}: {{ include "sglang-ext.word" $amount | quote }}
  {{- end }}
{{- end }}

{{- define "sglang-ext.probes" -}}
{{- $v := .Values -}}
startupProbe:
  periodSeconds: {{ int $v.probes.startup.periodSeconds }}
  failureThreshold: {{ int $v.probes.startup.failureThreshold }}
  {{- if $v.startupGate.enabled }}
  timeoutSeconds: {{ int $v.startupGate.timeoutSeconds }}
  exec:
    command:
      - python3
      - /etc/sglang-ext/probe.py
      - gate
      - http://127.0.0.1:{{ int $v.server.port }}
      - --tokens={{ int $v.startupGate.maxTokens }}
      - --timeout={{ sub (int $v.startupGate.timeoutSeconds) 2 }}
      {{- if $v.speculative.draft }}
      - --above={{ $v.startupGate.minAcceptanceLength }}
      {{- end }}
      - {{ printf "--prompt=%s" $v.startupGate.prompt | quote }}
  {{- else }}
  timeoutSeconds: {{ int $v.probes.startup.timeoutSeconds }}
  httpGet:
    path: /health_generate
    port: http
  {{- end }}
readinessProbe:
  periodSeconds: {{ int $v.probes.readiness.periodSeconds }}
  failureThreshold: {{ int $v.probes.readiness.failureThreshold }}
  timeoutSeconds: {{ int $v.probes.readiness.timeoutSeconds }}
  httpGet:
    path: /ready
    port: http
livenessProbe:
  periodSeconds: {{ int $v.probes.liveness.periodSeconds }}
  failureThreshold: {{ int $v.probes.liveness.failureThreshold }}
  timeoutSeconds: {{ int $v.probes.liveness.timeoutSeconds }}
  httpGet:
    path: /health
    port: http
{{- end }}

{{- define "sglang-ext.downloads" -}}
{{- $v := .Values -}}
{{- range $number, $item := $v.download.items }}
- name: download-{{ $number }}
  {{- if hasPrefix "s3://" $item.from }}
  image: {{ $v.download.s3Image }}
  {{- else if hasPrefix "oci://" $item.from }}
  image: {{ $v.download.ociImage }}
  {{- else }}
  image: {{ include "sglang-ext.image" $ }}
  {{- end }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command: [sh, /etc/sglang-ext/download.sh, {{ $item.from | quote }}, {{ $item.to | quote }}]
  env:
    - name: HOME
      value: /tmp
    {{- with $v.download.s3Endpoint }}
    - name: AWS_ENDPOINT_URL
      value: {{ . | quote }}
    {{- end }}
    {{- with include "sglang-ext.hubEnv" $ }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with $v.download.existingSecret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  resources:
    requests: {cpu: "1", memory: 2Gi}
    limits: {memory: 8Gi}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    {{- include "sglang-ext.helperSecurity" $ | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: {{ $v.storage.models.mountPath }}}
    - {name: scripts, mountPath: /etc/sglang-ext, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- define "sglang-ext.volume" -}}
{{- $store := .store -}}
{{- if eq $store.type "hostPath" -}}
hostPath:
  path: {{ $store.hostPath }}
  type: Directory
{{- else if eq $store.type "image" -}}
image:
  reference: {{ $store.imageReference }}
{{- else if eq $store.type "emptyDir" -}}
emptyDir:
  sizeLimit: {{ $store.size }}
{{- else -}}
persistentVolumeClaim:
  claimName: {{ eq $store.type "claim" | ternary (printf "%s-%s" (include "sglang-ext.fullname" .root) .name) $store.existingClaim }}
{{- end }}
{{- end }}

{{- define "sglang-ext.podTemplate" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $profile := get $v.gpu.profiles $v.gpu.profile -}}
{{- $readOnly := or $v.storage.models.readOnly (eq $v.storage.models.type "image") -}}
metadata:
  labels:
    # No versions here: a new chart that changes nothing else must not restart a server.
    {{- include "sglang-ext.instance" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    track: {{ $v.track }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed script means a changed pod.
    checksum/scripts: {{ printf "%s%s" ($root.Files.Get "files/probe.py") ($root.Files.Get "files/download.sh") | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "sglang-ext.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int $v.shutdown.graceSeconds }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "sglang-ext.podSecurity" $root | nindent 4 }}
  {{- with merge (dict) $v.nodeSelector (default (dict) $profile.nodeSelector) }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat (default (list) $profile.tolerations) $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "sglang-ext.downloads" $root }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "sglang-ext.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        {{- include "sglang-ext.args" . | nindent 8 }}
      env:
        {{- include "sglang-ext.env" $root | nindent 8 }}
      ports:
        - name: http
          containerPort: {{ int $v.server.port }}
          protocol: TCP
      {{- if eq .role "server" }}
      {{- include "sglang-ext.probes" $root | nindent 6 }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ int $v.shutdown.preStopSeconds | quote }}]
      resources:
        {{- include "sglang-ext.resources" $root | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- include "sglang-ext.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: models
          mountPath: {{ $v.storage.models.mountPath }}
          {{- if $readOnly }}
          readOnly: true
          {{- end }}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: scripts, mountPath: /etc/sglang-ext, readOnly: true}
  volumes:
    - name: models
      {{- include "sglang-ext.volume" (dict "root" $root "name" "models" "store" $v.storage.models) | nindent 6 }}
    - name: cache
      {{- include "sglang-ext.volume" (dict "root" $root "name" "cache" "store" $v.storage.cache) | nindent 6 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $v.storage.shm }}
    # SGLang makes its folder of metric files here, a new one at every start.
    - name: tmp
      emptyDir: {}
    - name: scripts
      configMap:
        name: {{ include "sglang-ext.fullname" $root }}-scripts
{{- end }}
