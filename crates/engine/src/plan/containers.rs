//! Images and environments of containers, which are known when a job is dispatched.

use std::collections::BTreeMap;

use super::context::rendered as text;
use crate::expr::Context;
use crate::lock::{Container, Job, Service, Value, is_image};

/// The container and the services of a job with their templates rendered.
pub(super) fn rendered(job: &Job, context: &Context) -> Result<(Option<Container>, BTreeMap<String, Service>), String> {
    let container = match &job.container {
        Some(container) => {
            let (image, env) = of("container", &container.image, &container.env, context)?;
            Some(Container { image, env, ..container.clone() })
        }
        None => None,
    };
    let services = job.services.iter().map(|(name, service)| {
        let (image, env) = of(&format!("services.{name}"), &service.image, &service.env, context)?;
        Ok((name.clone(), Service { image, env, ..service.clone() }))
    });
    Ok((container, services.collect::<Result<_, String>>()?))
}

fn of(
    owner: &str,
    image: &Value,
    env: &BTreeMap<String, Value>,
    context: &Context,
) -> Result<(Value, BTreeMap<String, Value>), String> {
    let name = text(image, context).map_err(|error| format!("{owner}.image: {error}"))?;
    if !is_image(&name) {
        let shown: String = name.chars().take(80).collect();
        return Err(format!("{owner}.image: `{shown}` is not the name of an image, such as `rust:1.86`"));
    }
    let render = |(name, value): (&String, &Value)| {
        let value = text(value, context).map_err(|error| format!("{owner}.env.{name}: {error}"))?;
        Ok((name.clone(), Value::fixed(value)))
    };
    Ok((Value::fixed(name), env.iter().map(render).collect::<Result<_, String>>()?))
}

/// Everything of them that is rendered.
pub(super) fn values(job: &Job) -> impl Iterator<Item = &Value> {
    let container = job.container.iter().flat_map(|of| std::iter::once(&of.image).chain(of.env.values()));
    let services = job.services.values().flat_map(|of| std::iter::once(&of.image).chain(of.env.values()));
    container.chain(services)
}
