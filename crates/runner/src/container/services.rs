//! Services: containers beside a job, up and healthy before its first step.

use std::collections::BTreeMap;
use std::time::Duration;

use kici_containers::{Engine, State};
use kici_engine::lock::{Health, Service, service_variable};

use super::job::Notes;
use super::said;
use super::spec::{self, Bounds, Names};

/// Longest that one question for the health may take.
const ASKED: Duration = Duration::from_secs(30);
/// Lines of a failing service that are shown.
const LOG_LINES: u32 = 50;

/// Makes and starts a service, and waits until it is ready. Returns its variables for the steps.
pub(super) async fn start(
    engine: &Engine,
    name: &str,
    service: &Service,
    names: &Names,
    bounds: Bounds,
    inside: bool,
    notes: &Notes,
) -> Result<BTreeMap<String, String>, String> {
    let failed = |error: String| format!("service `{name}`: {error}");
    let document = spec::service_document(name, service, names, bounds, !inside);
    let id = engine.create(&format!("{}-svc-{name}", names.job), &document).await.map_err(said).map_err(failed)?;
    engine.start(&id).await.map_err(said).map_err(failed)?;
    let ready = ready(engine, &id, service.health.as_ref()).await;
    let state = match ready {
        Ok(state) => state,
        Err(why) => {
            let log = engine.logs(&id, LOG_LINES).await.unwrap_or_default();
            notes.say(format!("service `{name}`: {why}; the end of its output:"));
            log.lines().for_each(|line| notes.say(format!("{name} | {line}")));
            let last =
                log.lines().rev().find(|line| !line.trim().is_empty()).map(|line| format!("; it said last: {line}"));
            return Err(failed(format!("{why}{}", last.unwrap_or_default())));
        }
    };
    notes.say(format!("service `{name}` is ready"));
    variables(name, service, &state, inside).map_err(failed)
}

async fn ready(engine: &Engine, id: &str, health: Option<&Health>) -> Result<State, String> {
    let mut asked = 0;
    let mut answer = String::new();
    loop {
        let state = engine.inspect(id).await.map_err(said)?;
        if !state.running {
            let memory = if state.oom_killed { " for want of memory" } else { "" };
            return Err(format!("it ended with exit code {}{memory} before it was ready", state.exit_code));
        }
        let Some(health) = health else { return Ok(state) };
        if asked == health.retries {
            return Err(format!("it is not healthy after {asked} questions{answer}"));
        }
        asked += 1;
        match engine.exec(id, &["sh", "-c", &health.run], ASKED).await {
            Ok(done) if done.code == 0 => return Ok(state),
            Ok(done) => {
                let said =
                    done.output.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().to_owned();
                answer = format!(" (`{}` answers with exit code {}: {said})", health.run.trim(), done.code);
            }
            // It may have ended just now, which the next look tells.
            Err(error) => answer = format!(" ({error})"),
        }
        tokio::time::sleep(Duration::from_millis(health.interval_ms.max(10))).await;
    }
}

/// `KICI_SERVICE_<NAME>_HOST` and `KICI_SERVICE_<NAME>_PORT_<PORT>`: where steps reach it, in a container and beside one.
fn variables(name: &str, service: &Service, state: &State, inside: bool) -> Result<BTreeMap<String, String>, String> {
    let prefix = format!("KICI_SERVICE_{}", service_variable(name));
    let host = if inside { name } else { "127.0.0.1" };
    let mut all = BTreeMap::from([(format!("{prefix}_HOST"), host.to_owned())]);
    for port in &service.ports {
        let number = if inside {
            port.container
        } else {
            let mapped = state.ports.get(&format!("{}/tcp", port.container));
            *mapped.ok_or_else(|| format!("port {} is not open on the host", port.container))?
        };
        all.insert(format!("{prefix}_PORT_{}", port.container), number.to_string());
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use kici_engine::lock::{Port, Value};

    use super::*;

    #[test]
    fn the_same_variables_lead_to_a_service_in_a_container_and_beside_one() {
        let ports = vec![Port { container: 5432, host: None }];
        let service =
            Service { image: Value::fixed("db"), env: BTreeMap::new(), ports, health: None, credentials: None };
        let state = State { running: true, ports: [("5432/tcp".to_owned(), 33_000)].into(), ..State::default() };
        let of = |inside| variables("my-db", &service, &state, inside).expect("mapped").into_iter().collect::<Vec<_>>();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let (host, port) = ("KICI_SERVICE_MY_DB_HOST", "KICI_SERVICE_MY_DB_PORT_5432");
        assert_eq!(of(true), [pair(host, "my-db"), pair(port, "5432")]);
        assert_eq!(of(false), [pair(host, "127.0.0.1"), pair(port, "33000")]);
        assert!(variables("db", &service, &State::default(), false).is_err());
    }
}
