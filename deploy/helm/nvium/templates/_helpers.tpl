{{- define "nvium.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "nvium.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "nvium.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "nvium.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "nvium.selector" -}}
app.kubernetes.io/name: {{ include "nvium.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nvium.labels" -}}
{{ include "nvium.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "nvium.serviceAccount" -}}
{{- default (ternary (include "nvium.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* The times for goodbye and for draining, for connections and the device thread to end (5 s each), and 5 s more. */}}
{{- define "nvium.graceSeconds" -}}
{{- addf (default 0 .Values.settings.goodbye_seconds) (default 30 .Values.settings.drain_seconds) 15 | ceil | int -}}
{{- end -}}
