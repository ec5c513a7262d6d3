//! The JSON form of a log line: one flat object, so that a log store can index `run_id` without knowing span names.

use std::fmt;
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::logging::Service;

/// Names that belong to the line itself; a field of that name is left out rather than printed twice.
const OWN: [&str; 5] = ["timestamp", "level", "message", "service", "instance_id"];

/// The name of this process, where it became known after the log began.
pub(crate) static INSTANCE: OnceLock<String> = OnceLock::new();

/// Formats an event with its span fields, outermost first, as one flat object. Inner spans win over outer ones and the
/// event wins over both.
pub(crate) struct FlatJson {
    service: &'static str,
    instance_id: String,
}

impl FlatJson {
    pub(crate) fn new(service: Service, instance_id: &str) -> Self {
        Self { service: service.as_str(), instance_id: instance_id.to_owned() }
    }
}

impl<S> FormatEvent<S, JsonFields> for FlatJson
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    JsonFields: for<'w> FormatFields<'w>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Map::new();
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            let extensions = span.extensions();
            let Some(formatted) = extensions.get::<FormattedFields<JsonFields>>() else { continue };
            // Fields that do not parse are the formatter's own fault; a log line must not fail for them.
            if let Ok(Value::Object(of_span)) = serde_json::from_str(&formatted.fields) {
                fields.extend(of_span.into_iter().filter(|(name, _)| !OWN.contains(&name.as_str())));
            }
        }
        let mut collector = Collector { fields, message: String::new() };
        event.record(&mut collector);

        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let metadata = event.metadata();
        let mut line = Map::new();
        line.insert("timestamp".into(), time.into());
        line.insert("level".into(), metadata.level().as_str().to_ascii_lowercase().into());
        line.insert("message".into(), collector.message.into());
        line.insert("service".into(), self.service.into());
        let id = Some(&self.instance_id).filter(|id| !id.is_empty()).or_else(|| INSTANCE.get());
        if let Some(id) = id {
            line.insert("instance_id".into(), id.clone().into());
        }
        line.insert("target".into(), metadata.target().into());
        line.extend(collector.fields);
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// Collects the fields of an event as JSON values, the message apart.
struct Collector {
    fields: Map<String, Value>,
    message: String,
}

impl Collector {
    fn put(&mut self, field: &Field, value: Value) {
        if field.name() == "message" {
            self.message = match value {
                Value::String(text) => text,
                other => other.to_string(),
            };
        } else if !OWN.contains(&field.name()) {
            // Raw identifiers (`r#type`) are a Rust matter.
            let name = field.name().strip_prefix("r#").unwrap_or(field.name());
            self.fields.insert(name.to_owned(), value);
        }
    }
}

impl Visit for Collector {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut text = value.to_string();
        let mut source = value.source();
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        self.put(field, text.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}").into());
    }
}
