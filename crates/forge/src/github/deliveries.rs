//! Deliveries that did not reach us (R8). GitHub does not repeat them by itself.
//! <https://docs.github.com/en/webhooks/using-webhooks/handling-failed-webhook-deliveries>

use std::collections::HashSet;

use kici_engine::time::Ts;
use serde::Deserialize;
use serde_json::json;

use super::api::Api;
use super::auth::App;
use crate::forge::{FailedDelivery, ForgeError};

/// Pages of 100 that are looked at: a small part of the calls that an App has in an hour.
const MAX_PAGES: usize = 200;

#[derive(Deserialize)]
struct Attempt {
    id: u64,
    guid: String,
    delivered_at: Ts,
    status_code: i64,
    event: String,
}

impl Attempt {
    fn is_good(&self) -> bool {
        (200..300).contains(&self.status_code)
    }
}

/// The newest attempt of every delivery since `since` that has no good attempt. Only what all pages say counts: when one of
/// them cannot be had, nothing does.
pub(super) async fn failed(api: &Api, app: &App, since: Ts) -> Result<Vec<FailedDelivery>, ForgeError> {
    let mut url = api.url(&["app/hook/deliveries"])?;
    url.query_pairs_mut().append_pair("per_page", "100");
    let mut next = Some(url);
    let mut settled = HashSet::new();
    let mut failed: Vec<FailedDelivery> = Vec::new();
    for _ in 0..MAX_PAGES {
        let Some(url) = next.take() else { break };
        // It lives for some minutes only, and there may be many pages.
        let jwt = app.statement()?;
        // Newest first.
        let (page, following): (Vec<Attempt>, _) = api.page("webhook deliveries of the App", url, &jwt).await?;
        let ended = page.iter().any(|a| a.delivered_at < since);
        for attempt in page.into_iter().filter(|a| a.delivered_at >= since) {
            if attempt.is_good() {
                failed.retain(|f| f.guid != attempt.guid);
                settled.insert(attempt.guid);
            } else if settled.insert(attempt.guid.clone()) {
                failed.push(FailedDelivery {
                    id: attempt.id.to_string(),
                    guid: attempt.guid,
                    event: attempt.event,
                    at: attempt.delivered_at,
                    status: u16::try_from(attempt.status_code).unwrap_or(0),
                });
            }
        }
        next = following.filter(|_| !ended);
    }
    if next.is_some() {
        let oldest = failed.last().map(|attempt| attempt.at);
        tracing::warn!(
            pages = MAX_PAGES,
            ?oldest,
            "GitHub's log of deliveries is longer than what is read at once; look at it for older ones that failed"
        );
    }
    // The oldest are the ones that somebody waits for longest.
    failed.reverse();
    Ok(failed)
}

/// Asks for another attempt.
pub(super) async fn again(api: &Api, app: &App, id: &str) -> Result<(), ForgeError> {
    let what = format!("delivery {id}");
    if id.is_empty() || !id.bytes().all(|b| b.is_ascii_digit()) {
        return Err(ForgeError::not_found(what));
    }
    let jwt = app.statement()?;
    let url = api.url(&["app/hook/deliveries", id, "attempts"])?;
    api.order(&what, url, &jwt, &json!({})).await
}
