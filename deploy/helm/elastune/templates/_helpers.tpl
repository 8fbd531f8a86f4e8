{{- define "elastune.name" -}}
{{- if contains "elastune" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-elastune" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- define "elastune.instance" -}}
{{- printf "%s-%s" (include "elastune.name" .) .Release.Namespace | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- define "elastune.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- define "elastune.selector" -}}
app.kubernetes.io/name: elastune
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: scheduler
{{- end }}
{{- define "elastune.labels" -}}
{{ include "elastune.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "elastune.volume" -}}
{{- if not .Values.storage.enabled }}emptyDir: {}
{{- else if .Values.storage.volume }}{{ toYaml .Values.storage.volume }}
{{- else }}persistentVolumeClaim: {claimName: {{ .Values.storage.existingClaim | default (printf "%s-state" (include "elastune.name" .)) }}}
{{- end }}
{{- end }}
