// Checks custom resources, a JSON list on standard input, against their models; prints a JSON list of errors or nulls.
// Usage: node custom_resources.mjs NODE_MODULES
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const places = {
  ScaledObject: '@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject',
  HTTPRoute: '@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute',
  ServiceMonitor: '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor',
  PodMonitor: '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor',
  PrometheusRule: '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule',
};

const results = [];
for (const object of JSON.parse(readFileSync(0, 'utf8'))) {
  const { kind, apiVersion, ...rest } = object;
  const model = (await import(pathToFileURL(`${process.argv[2]}/${places[kind]}.js`).href))[kind];
  try {
    const made = new model(rest);
    if (made.apiVersion !== apiVersion) throw new Error(`${kind} is ${made.apiVersion}, not ${apiVersion}`);
    made.validate();
    results.push(null);
  } catch (error) {
    results.push(error.message);
  }
}
console.log(JSON.stringify(results));
