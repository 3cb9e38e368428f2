{{/* What cannot work is refused here, each with what, why and what to change. Types and unknown keys: values.schema.json. */}}

{{- define "sglang-ext.validate" -}}
{{- $v := .Values -}}
{{- $s := $v.speculative -}}
{{- $pods := mul (int (include "sglang-ext.mostReplicas" .)) (int $v.nodes) -}}

{{- if not $v.model.path -}}
{{- fail "model.path is empty; set it to the target: a Hugging Face name, or a path below storage.models.mountPath." -}}
{{- end -}}
{{- if and (not $s.draft) (ne $s.method "none") -}}
{{- fail (printf "speculative.method is %s, but speculative.draft is empty; name a drafter, or set speculative.method to none for plain decoding." $s.method) -}}
{{- end -}}
{{- if not $s.draft -}}
{{- range $name, $value := dict "draftRevision" $s.draftRevision "blockSize" $s.blockSize "draftAttentionBackend" $s.draftAttentionBackend "thresholds.single" $s.thresholds.single "thresholds.acc" $s.thresholds.acc -}}
{{- if $value -}}
{{- fail (printf "speculative.%s is set, but speculative.draft is empty; name the drafter that it is for, or leave it out." $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (hasPrefix "ready" $s.method) (not $v.model.hybrid) -}}
{{- fail (printf "speculative.method %s reads recurrent states, and model.hybrid says that the target has none; serve a hybrid target and set model.hybrid to true, or choose another method." $s.method) -}}
{{- end -}}
{{- if and (hasPrefix "ready" $s.method) (ne $s.family "dspark") -}}
{{- fail (printf "speculative.method %s extends DSpark drafters only; set speculative.family to dspark and serve such a drafter." $s.method) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $s.carriedRows)) (has $s.method (list "none" "ready")) -}}
{{- fail (printf "speculative.carriedRows is set, but speculative.method %s carries no rows; leave carriedRows out, or choose carryover, ready_carryover or auto." $s.method) -}}
{{- end -}}

{{- range $name, $reference := dict "image.tag" (printf ":%s" (default .Chart.AppVersion $v.image.tag)) "tests.image" $v.tests.image "download.s3Image" $v.download.s3Image "download.ociImage" $v.download.ociImage -}}
{{- if hasSuffix ":latest" $reference -}}
{{- fail (printf "%s is latest, which names another image every day; set a version, or a digest." $name) -}}
{{- end -}}
{{- if and (ne $name "image.tag") (not (contains ":" (base $reference))) -}}
{{- fail (printf "%s (%s) has no tag, which means latest; add a version." $name $reference) -}}
{{- end -}}
{{- end -}}

{{- if not (hasKey $v.gpu.profiles $v.gpu.profile) -}}
{{- fail (printf "gpu.profile %s is not among gpu.profiles (%s); choose one of them or add yours." $v.gpu.profile (keys $v.gpu.profiles | sortAlpha | join ", ")) -}}
{{- end -}}

{{- if gt (int $v.probes.liveness.timeoutSeconds) 0 -}}
{{- range $probe, $timeout := dict "probes.liveness" $v.probes.liveness.timeoutSeconds "probes.startup" $v.probes.startup.timeoutSeconds -}}
{{- if lt (int $timeout) 21 -}}
{{- fail (printf "%s.timeoutSeconds is %d, but SGLang answers a health request after up to 20 seconds; set it to 21 or more." $probe (int $timeout)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $needed := add (int $v.shutdown.preStopSeconds) (int $v.shutdown.maxRequestSeconds) 25 -}}
{{- if lt (int $v.shutdown.graceSeconds) (int $needed) -}}
{{- fail (printf "shutdown.graceSeconds is %d, but preStopSeconds %d + maxRequestSeconds %d + 25 (SGLang looks for the signal and for the last answer every 5 seconds each and gives its schedulers 15) is %d; raise it to at least that, or lower the others." (int $v.shutdown.graceSeconds) (int $v.shutdown.preStopSeconds) (int $v.shutdown.maxRequestSeconds) (int $needed)) -}}
{{- end -}}

{{- if and (eq $v.strategy.type "RollingUpdate") (eq (int $v.strategy.maxSurge) 0) (eq (int $v.strategy.maxUnavailable) 0) -}}
{{- fail "strategy.maxSurge and strategy.maxUnavailable are both 0, so no pod could ever be replaced; set one of them to 1." -}}
{{- end -}}

{{- if ne $v.autoscaling.kind "none" -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas %d is above maxReplicas %d; lower one or raise the other." (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if eq $v.monitoring.kind "none" -}}
{{- fail (printf "autoscaling.kind %s works on metrics, and monitoring.kind is none; set it to PodMonitor or ServiceMonitor." $v.autoscaling.kind) -}}
{{- end -}}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.serverAddress) -}}
{{- fail "autoscaling.kind is keda, but autoscaling.serverAddress is empty; set the URL of Prometheus." -}}
{{- end -}}
{{- end -}}

{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled is true, but httpRoute.parentRefs is empty; name the Gateway." -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- fail "ingress.enabled is true, but ingress.host is empty; name the host." -}}
{{- end -}}
{{- if and (eq $v.track "canary") (or $v.ingress.enabled $v.httpRoute.enabled) -}}
{{- fail "track is canary, and a canary is reached through the stable release; leave ingress and httpRoute off here and set httpRoute.canary.service there." -}}
{{- end -}}

{{- include "sglang-ext.validateStorage" (dict "root" . "pods" $pods) -}}
{{- include "sglang-ext.validateWords" . -}}
{{- end }}

{{- define "sglang-ext.validateStorage" -}}
{{- $root := .root -}}
{{- $pods := int .pods -}}
{{- $v := $root.Values -}}
{{- range $name := list "models" "cache" -}}
{{- $store := get $v.storage $name -}}
{{- if and (has $store.type (list "existingClaim" "hostPath" "image")) (not (get $store (ternary "imageReference" $store.type (eq $store.type "image")))) -}}
{{- $key := ternary "imageReference" $store.type (eq $store.type "image") -}}
{{- fail (printf "storage.%s.type is %s, but storage.%s.%s is empty; set it, or choose another type." $name $store.type $name $key) -}}
{{- end -}}
{{- if has $store.type (list "claim" "existingClaim") -}}
{{- $modes := list $store.accessMode -}}
{{- if eq $store.type "existingClaim" -}}
{{- with lookup "v1" "PersistentVolumeClaim" $root.Release.Namespace $store.existingClaim -}}
{{- $modes = .spec.accessModes -}}
{{- end -}}
{{- end -}}
{{- $shared := or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes) -}}
{{- if and (gt $pods 1) (not $shared) -}}
{{- fail (printf "storage.%s is a %s claim, which one node mounts at a time, and up to %d pods would need it; set storage.%s.accessMode to ReadWriteMany with a class that has it, use emptyDir or hostPath, or keep one pod." $name (first $modes) $pods $name) -}}
{{- end -}}
{{- if and (not $shared) (eq $v.strategy.type "RollingUpdate") (gt (int $v.strategy.maxSurge) 0) -}}
{{- fail (printf "storage.%s is a %s claim, and strategy.maxSurge %d would start a pod that cannot mount it; set strategy.maxSurge to 0 or strategy.type to Recreate." $name (first $modes) (int $v.strategy.maxSurge)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $models := $v.storage.models -}}
{{- $fixed := or $models.readOnly (eq $models.type "image") (and (has $models.type (list "claim" "existingClaim")) (eq $models.accessMode "ReadOnlyMany")) -}}
{{- $targets := list -}}
{{- range $v.download.items -}}
{{- $targets = append $targets .to -}}
{{- if not (hasPrefix (printf "%s/" $models.mountPath) .to) -}}
{{- fail (printf "download.items: %s lies outside storage.models.mountPath %s; choose a path below it." .to $models.mountPath) -}}
{{- end -}}
{{- if $fixed -}}
{{- fail (printf "download.items would write %s into a read-only model volume; leave the downloads out, or make storage.models writable." .to) -}}
{{- end -}}
{{- end -}}
{{- range $key, $path := dict "model.path" $v.model.path "speculative.draft" $v.speculative.draft -}}
{{- if hasPrefix "/" $path -}}
{{- if not (hasPrefix (printf "%s/" $models.mountPath) $path) -}}
{{- fail (printf "%s %s lies outside storage.models.mountPath %s, where no volume is; move it below." $key $path $models.mountPath) -}}
{{- end -}}
{{- if and (eq $models.type "emptyDir") (not (has $path $targets)) -}}
{{- fail (printf "%s is the path %s, but storage.models is an emptyDir, which starts empty; add a download to that path, or choose another storage.models.type." $key $path) -}}
{{- end -}}
{{- else if and $path $fixed (not $v.hub.offline) -}}
{{- fail (printf "%s %s would be downloaded into a read-only model volume; give its path below %s, or set hub.offline to true where the volume holds the Hub's cache." $key $path $models.mountPath) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "sglang-ext.validateWords" -}}
{{- $owned := dict "--model-path" "model.path" "--model" "model.path" "--revision" "model.revision" "--served-model-name" "model.servedName" "--draft" "speculative.draft" "--method" "speculative.method" "--speculative-algorithm" "speculative.method" "--speculative-draft-model-path" "speculative.draft" "--speculative-draft-model" "speculative.draft" "--speculative-draft-model-revision" "speculative.draftRevision" "--speculative-num-draft-tokens" "speculative.blockSize" "--speculative-dspark-block-size" "speculative.blockSize" "--speculative-dflash-block-size" "speculative.blockSize" "--speculative-draft-attention-backend" "speculative.draftAttentionBackend" "--speculative-accept-threshold-single" "speculative.thresholds.single" "--speculative-accept-threshold-acc" "speculative.thresholds.acc" "--context-length" "server.contextLength" "--mem-fraction-static" "server.memFractionStatic" "--max-running-requests" "server.maxRunningRequests" "--max-mamba-cache-size" "server.maxMambaCacheSize" "--mamba-full-memory-ratio" "server.mambaFullMemoryRatio" "--port" "server.port" "--api-key" "auth.existingSecret" "--admin-api-key" "auth.adminExistingSecret" "--tp" "gpu.count" "--tp-size" "gpu.count" "--tensor-parallel-size" "gpu.count" "--nnodes" "nodes" "--host" "" "--node-rank" "" "--dist-init-addr" "" "--nccl-init-addr" "" "--enable-metrics" "" "--config" "" "--pp" "" "--pp-size" "" "--pipeline-parallel-size" "" "--check" "" -}}
{{- range .Values.server.extraArgs -}}
{{- $flag := first (splitList "=" (toString .)) -}}
{{- if hasKey $owned $flag -}}
{{- with get $owned $flag -}}
{{- fail (printf "server.extraArgs has %s, which the chart sets from %s; set that instead." $flag .) -}}
{{- end -}}
{{- fail (printf "server.extraArgs has %s, which the chart sets itself or cannot work with; leave it out." $flag) -}}
{{- end -}}
{{- end -}}
{{- $names := keys .Values.speculative.env -}}
{{- range .Values.server.extraEnv -}}
{{- if has .name $names -}}
{{- fail (printf "The environment has %s twice in speculative.env and server.extraEnv; keep one." .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $ours := dict "SGLANG_EXT_CARRIED_ROWS" "speculative.carriedRows" "SGLANG_EXT_EXPECTED_METHOD" "speculative.method and speculative.family" "SGLANG_EXT_API_KEY" "auth.existingSecret" "SGLANG_EXT_ADMIN_KEY" "auth.adminExistingSecret" "HF_TOKEN" "hub.existingSecret" "HF_HUB_OFFLINE" "hub.offline" "HOME" "" "SGLANG_CACHE_DIR" "" "HF_HOME" "" -}}
{{- range $names -}}
{{- if eq . "PROMETHEUS_MULTIPROC_DIR" -}}
{{- fail "PROMETHEUS_MULTIPROC_DIR is set, and files of the process before a restart would be counted again; leave it out: SGLang makes a fresh folder below /tmp, an emptyDir, at every start." -}}
{{- end -}}
{{- if hasKey $ours . -}}
{{- $variable := . -}}
{{- with get $ours . -}}
{{- fail (printf "The environment has %s, which the chart sets from %s; set that instead." $variable .) -}}
{{- end -}}
{{- fail (printf "The environment has %s, which the chart points at a volume; leave it out." .) -}}
{{- end -}}
{{- end -}}
{{- end }}
