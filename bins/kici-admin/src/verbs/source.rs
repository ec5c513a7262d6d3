//! `source`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use kici_api::dto::SecretText;
use kici_api::dto::sources::{AddSource, SetSecrets, SourceKind, SourceView, TriggerSource};
use serde_json::{Map, Value as Json, json};

use super::Context;
use crate::args::whole;
use crate::exit::Failure;
use crate::output::{Column, fields, status, text};

/// Sources of events and commits.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Add a source
    #[command(subcommand)]
    Add(Add),
    /// List sources
    List,
    /// Show a source
    Get {
        /// Name or id
        name: String,
    },
    /// Remove a source; its runs and events stay
    Remove {
        /// Name or id
        name: String,
    },
    /// Take webhooks of a source again
    Enable {
        /// Name or id
        name: String,
    },
    /// Answer webhooks of a source with 404
    Disable {
        /// Name or id
        name: String,
    },
    /// Give a source new secrets; those that are not named stay
    SetSecret {
        /// Name or id
        name: String,
        #[command(flatten)]
        secret: WebhookSecret,
        /// File with the GitHub App's private key (PEM)
        #[arg(long)]
        private_key_file: Option<PathBuf>,
        /// Accept webhooks signed with an earlier secret too, until the secret is set again without this
        #[arg(long)]
        keep_old: bool,
    },
    /// Send a push event for a ref, as if the forge had
    Trigger {
        /// Name or id
        name: String,
        /// Branch, tag or full ref [default: the default branch]
        #[arg(long = "ref")]
        git_ref: Option<String>,
        /// owner/name, for sources with several repositories
        #[arg(long)]
        repo: Option<String>,
    },
}

/// Kinds of sources.
#[derive(Debug, Subcommand)]
pub(crate) enum Add {
    /// A GitHub App
    Github {
        /// Name, 1 to 64 of a-z, 0-9, . _ -
        name: String,
        /// The App's numeric id
        #[arg(long, value_parser = whole::<u64>)]
        app_id: u64,
        /// The API of a GitHub Enterprise server
        #[arg(long)]
        base_url: Option<String>,
        /// File with the App's private key (PEM)
        #[arg(long)]
        private_key_file: Option<PathBuf>,
        #[command(flatten)]
        secret: WebhookSecret,
    },
    /// Anything that can send a webhook
    Generic {
        /// Name, 1 to 64 of a-z, 0-9, . _ -
        name: String,
        /// How a call proves where it comes from
        #[arg(long, default_value = "hmac")]
        verification: Verification,
        /// Header with the signature or token
        #[arg(long)]
        header: Option<String>,
        /// Network that may call, for --verification cidr; may be given again
        #[arg(long, value_name = "NETWORK")]
        allow: Vec<String>,
        /// Header that names the event
        #[arg(long)]
        event_header: Option<String>,
        /// Further settings as a JSON object
        #[arg(long, value_name = "JSON")]
        config: Option<String>,
        #[command(flatten)]
        secret: WebhookSecret,
    },
    /// A repository on the orchestrator's disk
    Local {
        /// Name, 1 to 64 of a-z, 0-9, . _ -
        name: String,
        /// Path of the repository on the orchestrator's machine
        path: PathBuf,
        /// owner/name that events carry
        #[arg(long)]
        repo: Option<String>,
        /// The default branch, where it is not the checked-out one
        #[arg(long)]
        default_branch: Option<String>,
        #[command(flatten)]
        secret: WebhookSecret,
    },
}

/// The secret that webhooks are signed with.
#[derive(Debug, Args)]
pub(crate) struct WebhookSecret {
    /// File with the secret that webhooks are signed with; - is stdin
    #[arg(long)]
    webhook_secret_file: Option<PathBuf>,
}

/// How a generic webhook proves where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Verification {
    /// HMAC-SHA256 of the body in a header.
    Hmac,
    /// The secret in a header.
    Token,
    /// Authorization: Bearer SECRET.
    Bearer,
    /// The caller's address.
    Cidr,
    /// Not at all: anybody who reaches the address can start workflows.
    None,
}

/// Runs the command.
pub(crate) async fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let (client, out) = (context.client()?, &context.out);
    match verb {
        Verb::Add(add) => {
            let source = client.add_source(&request(add)?).await?;
            out.say(format!("source `{}` added; it takes webhooks at {}", source.name, source.webhook_path));
            if let Some(missing) = missing(&source) {
                out.say(format!("warning: {missing}"));
            }
            show(context, &source)?;
        }
        Verb::List => out.page(&client.sources().await?, "no sources; add one with `source add`", &columns(context))?,
        Verb::Get { name } => show(context, &client.source(&name).await?)?,
        Verb::Remove { name } => {
            out.confirm(&format!("Source `{name}` will take no more events and cannot be brought back."))?;
            client.remove_source(&name).await?;
            out.say(format!("source `{name}` removed"));
        }
        Verb::Enable { name } => show(context, &client.enable_source(&name, true).await?)?,
        Verb::Disable { name } => show(context, &client.enable_source(&name, false).await?)?,
        Verb::SetSecret { name, secret, private_key_file, keep_old } => {
            let mut secrets = BTreeMap::new();
            insert_secret(&mut secrets, "private_key", "--private-key-file", private_key_file)?;
            insert_secret(&mut secrets, "webhook_secret", "--webhook-secret-file", secret.webhook_secret_file)?;
            if secrets.is_empty() {
                return Err(Failure::usage("name a secret: --webhook-secret-file or --private-key-file"));
            }
            show(context, &client.set_source_secrets(&name, &SetSecrets { secrets, keep_old }).await?)?;
        }
        Verb::Trigger { name, git_ref, repo } => {
            let accepted = client.trigger_source(&name, &TriggerSource { git_ref, repo }).await?;
            out.document(&accepted, |_| fields(&[("delivery", accepted.delivery_id.to_string())]))?;
        }
    }
    Ok(0)
}

/// What a source lacks so that it can do nothing yet.
fn missing(source: &SourceView) -> Option<String> {
    let lacks = |secret: &str| !source.secrets.iter().any(|name| name == secret);
    let verification = source.config.pointer("/verification/type").and_then(Json::as_str);
    let signed = match source.kind {
        SourceKind::Github => true,
        SourceKind::Generic => !matches!(verification, Some("cidr" | "none")),
        SourceKind::Local => false,
    };
    let (what, option) = if signed && lacks("webhook_secret") {
        ("a webhook secret every webhook is refused", "--webhook-secret-file")
    } else if source.kind == SourceKind::Github && lacks("private_key") {
        ("the App's private key its workflows cannot be read", "--private-key-file")
    } else {
        return None;
    };
    Some(format!("without {what}; use `source set-secret {} {option} FILE`", source.name))
}

fn request(add: Add) -> Result<AddSource, Failure> {
    let mut secrets = BTreeMap::new();
    let (name, kind, config, webhook) = match add {
        Add::Github { name, app_id, base_url, private_key_file, secret } => {
            insert_secret(&mut secrets, "private_key", "--private-key-file", private_key_file)?;
            (
                name,
                SourceKind::Github,
                object([("app_id", Some(json!(app_id))), ("base_url", base_url.map(Json::from))]),
                secret,
            )
        }
        Add::Generic { name, verification, header, allow, event_header, config, secret } => {
            let mut settings = object([
                ("verification", Some(verification_config(verification, header, allow))),
                ("event_from", event_header.map(|header| json!({ "header": header }))),
            ]);
            if let (Some(text), Json::Object(settings)) = (config, &mut settings) {
                let more: Map<String, Json> = serde_json::from_str(&text)
                    .map_err(|error| Failure::usage(format!("--config is not a JSON object: {error}")))?;
                settings.extend(more);
            }
            (name, SourceKind::Generic, settings, secret)
        }
        Add::Local { name, path, repo, default_branch, secret } => {
            let path = path.to_str().ok_or_else(|| Failure::usage("the path is not UTF-8"))?.to_owned();
            let config = object([
                ("path", Some(Json::from(path))),
                ("repo", repo.map(Json::from)),
                ("default_branch", default_branch.map(Json::from)),
            ]);
            (name, SourceKind::Local, config, secret)
        }
    };
    insert_secret(&mut secrets, "webhook_secret", "--webhook-secret-file", webhook.webhook_secret_file)?;
    Ok(AddSource { name, kind, config, secrets })
}

fn verification_config(verification: Verification, header: Option<String>, allow: Vec<String>) -> Json {
    let kind = |name: &str, more: (&str, Option<Json>)| object([("type", Some(Json::from(name))), more]);
    match verification {
        Verification::Hmac => kind("hmac", ("header", header.map(Json::from))),
        Verification::Token => kind("token", ("header", header.map(Json::from))),
        Verification::Bearer => kind("bearer", ("header", None)),
        Verification::Cidr => kind("cidr", ("allow", Some(Json::from(allow)))),
        Verification::None => kind("none", ("allow_unsigned", Some(Json::from(true)))),
    }
}

/// A JSON object of the members that are there.
fn object<const N: usize>(members: [(&str, Option<Json>); N]) -> Json {
    members.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect::<Map<_, _>>().into()
}

fn insert_secret(
    secrets: &mut BTreeMap<String, SecretText>,
    name: &str,
    option: &str,
    path: Option<PathBuf>,
) -> Result<(), Failure> {
    if let Some(path) = path {
        secrets.insert(name.to_owned(), read_secret(option, &path)?);
    }
    Ok(())
}

fn read_secret(option: &str, path: &Path) -> Result<SecretText, Failure> {
    let text =
        if path == Path::new("-") { std::io::read_to_string(std::io::stdin()) } else { std::fs::read_to_string(path) };
    let text = text.map_err(|error| Failure::usage(format!("{option} {}: {error}", path.display())))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err(Failure::usage(format!("{option} {}: the file is empty", path.display())));
    }
    Ok(SecretText::new(text))
}

fn columns(context: &Context) -> Vec<Column<'_, SourceView>> {
    vec![
        ("NAME", Box::new(|s| text(&s.name))),
        ("KIND", Box::new(|s| text(s.kind.as_str()))),
        ("ENABLED", Box::new(|s| status(if s.enabled { "yes" } else { "no" }))),
        ("WEBHOOKS", Box::new(|s| text(&s.webhook_path))),
        ("SECRETS", Box::new(|s| text(s.secrets.join(", ")))),
        ("ADDED", Box::new(|s| text(context.out.time(Some(s.created_at))))),
    ]
}

fn show(context: &Context, source: &SourceView) -> Result<(), Failure> {
    context.out.document(source, |out| {
        fields(&[
            ("name", source.name.clone()),
            ("id", source.id.to_string()),
            ("kind", source.kind.as_str().to_owned()),
            ("enabled", source.enabled.to_string()),
            ("routing key", source.routing_key.clone()),
            ("webhooks", source.webhook_path.clone()),
            ("config", source.config.to_string()),
            ("secrets", source.secrets.join(", ")),
            ("added", out.time(Some(source.created_at))),
        ])
    })
}
