{{/* The name of the release, with `warmroute` in it. */}}
{{- define "warmroute.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "warmroute" $name) }}{{ $name = printf "%s-warmroute" $name }}{{ end -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of a part, which also select its pods. The argument is (list . "NAME"). */}}
{{- define "warmroute.labels" -}}
{app.kubernetes.io/name: {{ index . 1 }}, app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}}
{{- end -}}

{{/* Labels of an object: the same, and those of `labels`. */}}
{{- define "warmroute.metaLabels" -}}
{{- $own := include "warmroute.labels" . -}}
{{- with (index . 0).Values.labels }}{{ merge ($own | fromYaml) . | toJson }}{{ else }}{{ $own }}{{ end -}}
{{- end -}}

{{/* Namespaces with Services that routers find engines by, as a list in JSON. */}}
{{- define "warmroute.namespaces" -}}
{{- $namespaces := list -}}
{{- range dig "discovery" "kubernetes" list (include "warmroute.config" . | fromYaml) -}}
{{- $namespaces = append $namespaces (contains "/" . | ternary (splitList "/" . | first) $.Release.Namespace) -}}
{{- end -}}
{{- uniq $namespaces | toJson -}}
{{- end -}}

{{- define "warmroute.account" -}}
{{- $default := .Values.serviceAccount.create | ternary (include "warmroute.fullname" .) "default" -}}
{{- .Values.serviceAccount.name | default $default -}}
{{- end -}}

{{/* The Secret with the password of Redis; empty without one. */}}
{{- define "warmroute.redisSecret" -}}
{{- $own := .Values.redis.deploy | ternary (printf "%s-redis" (include "warmroute.fullname" .)) "" -}}
{{- .Values.redis.secret | default $own -}}
{{- end -}}

{{/* The configuration file: what follows from other values, then `config`. */}}
{{- define "warmroute.config" -}}
{{- $found := dict -}}
{{- with .Values.engines.service -}}
{{- if .create }}{{ $_ := set $found "discovery" (dict "kubernetes" (list (printf "%s:http" .name))) }}{{ end -}}
{{- end -}}
{{- $url := .Values.redis.url -}}
{{- if .Values.redis.deploy -}}
{{- if $url }}{{ fail "set redis.deploy to false to use redis.url" }}{{ end -}}
{{- $url = printf "redis://%s-redis:6379/0" (include "warmroute.fullname" .) -}}
{{- end -}}
{{- if $url -}}
{{- $redis := dict "url" $url -}}
{{- if include "warmroute.redisSecret" . }}{{ $_ := set $redis "password_file" "/run/secrets/redis/password" }}{{ end -}}
{{- $_ := set $found "redis" $redis -}}
{{- end -}}
{{- mustMergeOverwrite $found (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{/* Its part that a running router does not follow: a change of it restarts the pods. */}}
{{- define "warmroute.restarting" -}}
{{- $config := omit (include "warmroute.config" . | fromYaml) "replicas" "experiment" -}}
{{- range $section, $followed := dict "policy" (list "name" "params") "log" (list "level") -}}
{{- range $followed }}{{ $_ := unset (get $config $section | default dict) . }}{{ end -}}
{{- if empty (get $config $section) }}{{ $_ := unset $config $section }}{{ end -}}
{{- end -}}
{{- $config | toYaml -}}
{{- end -}}

{{- define "warmroute.scheme" -}}
{{- dig "listen" "tls_cert" "" .Values.config | empty | ternary "HTTP" "HTTPS" -}}
{{- end -}}
