//! The log subscriber: what goes out, in which form, and where.

use std::io::{self, IsTerminal, Write};
use std::str::FromStr;

use tracing::Subscriber;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::TelemetryError;
use crate::json::{FlatJson, INSTANCE};

/// The program that speaks; the `service` field of every line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// `kici-orchestrator`.
    Orchestrator,
    /// `kici-agent`.
    Agent,
}

impl Service {
    /// The word that log lines carry.
    pub fn as_str(self) -> &'static str {
        match self {
            Service::Orchestrator => "orchestrator",
            Service::Agent => "agent",
        }
    }
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// [`Format::Pretty`] on a terminal, else [`Format::Json`].
    #[default]
    Auto,
    /// One JSON object a line.
    Json,
    /// For people; coloured on a terminal.
    Pretty,
}

impl FromStr for Format {
    type Err = TelemetryError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Format::Auto),
            "json" => Ok(Format::Json),
            "pretty" => Ok(Format::Pretty),
            other => Err(TelemetryError::Format(other.to_owned())),
        }
    }
}

/// What a process wants to see of itself.
#[derive(Debug, Clone)]
pub struct TelemetryConfig {
    /// Who speaks.
    pub service: Service,
    /// `instance.id` of an orchestrator, the agent id of an agent. Empty where it is kept in a directory that is not
    /// open yet; [`name_instance`] then tells it.
    pub instance_id: String,
    /// A level (`info`) or a filter (`info,kici_dispatch=debug`).
    pub level: String,
    /// The form of a line.
    pub format: Format,
}

/// Installs the log subscriber of this process, writing to standard output, and logs panics through it: a panic that
/// only reached standard error would be missing from a log that is collected as JSON lines.
///
/// # Errors
///
/// [`TelemetryError::Filter`] when the level does not parse, [`TelemetryError::AlreadyInstalled`] on a second call.
pub fn init(config: &TelemetryConfig) -> Result<(), TelemetryError> {
    let terminal = io::stdout().is_terminal();
    subscriber(config, terminal, io::stdout)?
        .try_init()
        .map_err(|_| TelemetryError::AlreadyInstalled("log subscriber"))?;
    log_panics();
    Ok(())
}

/// Gives the process the name that its further log lines carry, unless the configuration gave one. The first call counts.
pub fn name_instance(id: &str) {
    INSTANCE.get_or_init(|| id.to_owned());
}

fn subscriber<W>(
    config: &TelemetryConfig,
    terminal: bool,
    writer: W,
) -> Result<Box<dyn Subscriber + Send + Sync>, TelemetryError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let filter = EnvFilter::builder()
        .parse(&config.level)
        .map_err(|error| TelemetryError::Filter { filter: config.level.clone(), problem: error.to_string() })?;
    let json = match config.format {
        Format::Auto => !terminal,
        Format::Json => true,
        Format::Pretty => false,
    };
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    Ok(if json {
        let format = FlatJson::new(config.service, &config.instance_id);
        Box::new(registry.with(layer.fmt_fields(JsonFields::new()).event_format(format)))
    } else {
        Box::new(registry.with(layer.with_ansi(terminal)))
    })
}

/// Sends panics to the log. The hook of before still prints to standard error when nobody listens for errors.
fn log_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !tracing::enabled!(tracing::Level::ERROR) {
            return before(panic);
        }
        let message = panic.payload_as_str().unwrap_or("panic without a message");
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(error = message, place, "a task panicked");
        // The process may be about to abort: do not leave the line in a buffer. Nothing can be done about a failure.
        let _ = io::stdout().flush();
    }));
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Buffer {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }

        fn json(&self) -> Vec<Value> {
            self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        }
    }

    fn config(level: &str, format: Format) -> TelemetryConfig {
        TelemetryConfig { service: Service::Orchestrator, instance_id: "node-1".into(), level: level.into(), format }
    }

    fn logged(config: &TelemetryConfig, terminal: bool, emit: impl FnOnce()) -> Buffer {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = subscriber(config, terminal, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, emit);
        buffer
    }

    #[test]
    fn a_json_line_is_flat_and_names_its_scope() {
        let lines = logged(&config("info", Format::Json), false, || {
            let run = tracing::info_span!("run", run_id = "r1", request_id = "q1");
            let _run = run.enter();
            let job = tracing::info_span!("job", job_id = "j1", epoch = 3);
            let _job = job.enter();
            tracing::warn!(error = %"no route", took_ms = 7, ok = false, "could not \"offer\"\nthe job");
        })
        .json();
        let line = &lines[0];
        assert_eq!(lines.len(), 1);
        assert_eq!(line["level"], "warn");
        assert_eq!(line["message"], "could not \"offer\"\nthe job");
        assert_eq!(line["service"], "orchestrator");
        assert_eq!(line["instance_id"], "node-1");
        assert_eq!((&line["run_id"], &line["request_id"]), (&"r1".into(), &"q1".into()));
        assert_eq!((&line["job_id"], &line["epoch"]), (&"j1".into(), &3.into()));
        assert_eq!((&line["error"], &line["took_ms"]), (&"no route".into(), &7.into()));
        assert_eq!(line["ok"], false);
        assert_eq!(line["target"], "kici_telemetry::logging::tests");
        let time = line["timestamp"].as_str().unwrap();
        assert!(time.ends_with('Z') && time.as_bytes()[10] == b'T', "{time}");
    }

    #[test]
    fn a_name_that_comes_late_is_in_the_lines_after_it() {
        let unnamed = TelemetryConfig { instance_id: String::new(), ..config("info", Format::Json) };
        let lines = logged(&unnamed, false, || {
            tracing::info!("one");
            name_instance("node-2");
            tracing::info!("two");
        })
        .json();
        assert!(lines[0].get("instance_id").is_none());
        assert_eq!(lines[1]["instance_id"], "node-2");
    }

    #[test]
    fn fields_recorded_late_and_inner_spans_win() {
        let lines = logged(&config("info", Format::Json), false, || {
            let outer = tracing::info_span!("outer", agent_id = tracing::field::Empty, step = "a");
            outer.record("agent_id", "agent-9");
            let _outer = outer.enter();
            let inner = tracing::info_span!("inner", step = "b");
            let _inner = inner.enter();
            tracing::info!("one");
            tracing::info!(step = "c", "two");
        })
        .json();
        assert_eq!(lines[0]["agent_id"], "agent-9");
        assert_eq!(lines[0]["step"], "b");
        assert_eq!(lines[1]["step"], "c");
    }

    #[test]
    fn a_field_never_replaces_who_speaks() {
        let lines = logged(&config("info", Format::Json), false, || {
            tracing::info!(service = "intruder", timestamp = "never", level = "none", "x");
        })
        .json();
        assert_eq!(lines[0]["service"], "orchestrator");
        assert_eq!(lines[0]["level"], "info");
        assert_ne!(lines[0]["timestamp"], "never");
    }

    #[test]
    fn auto_is_json_unless_on_a_terminal() {
        let emit = || tracing::info!(answer = 42, "hello");
        assert_eq!(logged(&config("info", Format::Auto), false, emit).json()[0]["answer"], 42);
        let pretty = logged(&config("info", Format::Auto), true, emit).text();
        assert!(pretty.contains("hello") && pretty.contains("\u{1b}["), "{pretty}");
        let plain = logged(&config("info", Format::Pretty), false, emit).text();
        assert!(plain.contains("answer=42") && !plain.contains('\u{1b}'), "{plain}");
    }

    #[test]
    fn the_filter_selects_by_target() {
        let text = logged(&config("warn,special=debug", Format::Json), false, || {
            tracing::info!("hidden");
            tracing::debug!(target: "special", "shown");
        })
        .text();
        assert!(!text.contains("hidden") && text.contains("shown"), "{text}");
    }

    #[test]
    fn wrong_values_are_named() {
        let error = subscriber(&config("kici=loud", Format::Json), false, io::sink).err().unwrap();
        assert!(error.to_string().starts_with("log.level `kici=loud` is not a level or filter"), "{error}");
        assert_eq!(
            "xml".parse::<Format>().unwrap_err().to_string(),
            "log.format `xml` is not known; use auto, json or pretty"
        );
    }
}
