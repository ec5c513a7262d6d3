//! `kici mask`: a step names a value that must not be shown from now on.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use kici_credential_helper::server::{Conversation, Service};
use kici_credential_helper::wire::{Code, Refusal, arguments};
use kici_runner::mask::{MIN_VALUE_LEN, Masker};
use serde::Deserialize;
use serde_json::{Value as Json, json};

/// Values that one job may add: each is looked for in every line of its output.
const MAX_VALUES: usize = 500;
/// Longest value, in bytes: a private key of 16,384 bits has about 13,000.
const MAX_BYTES: usize = 16 * 1024;

/// Answers `mask.add` of one job.
#[derive(Clone)]
pub struct MaskService {
    masker: Arc<Masker>,
    added: Arc<Mutex<usize>>,
}

impl MaskService {
    /// Adds to what this hides.
    pub fn new(masker: Arc<Masker>) -> Self {
        Self { masker, added: Arc::default() }
    }

    fn add(&self, values: &[String]) -> Result<(), Refusal> {
        let usage = |text: String| Err(Refusal::new(Code::Usage, text));
        if values.iter().any(|value| value.trim().len() < MIN_VALUE_LEN) {
            return usage(format!("a value of less than {MIN_VALUE_LEN} characters would be hidden everywhere"));
        }
        if values.iter().any(|value| value.len() > MAX_BYTES) {
            return usage(format!("a value has at most {MAX_BYTES} bytes"));
        }
        let mut added = self.added.lock().unwrap_or_else(PoisonError::into_inner);
        if *added + values.len() > MAX_VALUES {
            return Err(Refusal::new(Code::Refused, format!("a job hides at most {MAX_VALUES} values")));
        }
        *added += values.len();
        self.masker.add(values.iter().map(String::as_str));
        Ok(())
    }
}

/// Arguments of `mask.add`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddArguments {
    values: Vec<String>,
}

impl Service for MaskService {
    fn meet(&self) -> Box<dyn Conversation> {
        Box::new(self.clone())
    }
}

#[async_trait]
impl Conversation for MaskService {
    async fn call(&mut self, verb: &str, body: Json) -> Result<Json, Refusal> {
        if verb != "add" {
            return Err(Refusal::new(Code::Usage, format!("this agent does not know `mask.{verb}`")));
        }
        let AddArguments { values } = arguments(body)?;
        self.add(&values)?;
        Ok(json!({}))
    }

    async fn end(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn values_are_added_within_bounds() {
        let masker = Arc::new(Masker::default());
        let mut service = MaskService::new(Arc::clone(&masker));
        let add = |values: Vec<String>| json!({ "values": values });
        service.call("add", add(vec!["of-the-step".into()])).await.expect("added");
        assert_eq!(masker.mask_text("an of-the-step value"), "an *** value");
        let cases = [
            (add(vec!["ab".into()]), Code::Usage),
            (add(vec![" \n ab \n".into()]), Code::Usage),
            (add(vec!["x".repeat(MAX_BYTES + 1)]), Code::Usage),
            (add((0..MAX_VALUES).map(|n| format!("value-{n}")).collect()), Code::Refused),
            (json!({ "value": "x" }), Code::Usage),
        ];
        for (body, code) in cases {
            let refused = service.call("add", body).await.expect_err("refused");
            assert_eq!(refused.code, code, "{}", refused.message);
        }
        assert!(service.call("forget", json!({ "values": [] })).await.is_err(), "nothing takes a value back");
    }
}
