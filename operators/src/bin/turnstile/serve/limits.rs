//! The limits: from a file, as a service reads it, or from `--limit`; and the semaphore for a client's parameters.

use std::{collections::BTreeMap, fmt::Write, path::Path, time::Duration};

use futures_util::future::join_all;
use tokio::sync::watch;
use tower_turnstile::{
    Limiter, Semaphore,
    config::{Config, ConfigFileError, LiveConfig},
};
use tower_turnstile_operate::{Declared, Operator, Registration, admin::Admin, beside::Beside};

use super::{
    args::{LimitArg, ServeArgs},
    form::SlotForm,
    problem::HttpProblem,
};
use crate::{
    args::Args,
    code,
    commands::CommandError,
    in_force::{Wanted, in_force},
    source,
};

/// The place of faults without a file.
const ARGUMENT: &str = "--limit";

pub(super) struct ServedLimits {
    live: LiveConfig,
    /// As last reloaded.
    config: watch::Sender<Config>,
}

impl ServedLimits {
    pub(super) async fn connect(args: &Args, serve: &ServeArgs) -> Result<Self, CommandError> {
        let (config, place) = match &serve.source.config {
            Some(path) => (source::read(args, path).await?, path.display().to_string()),
            None => {
                let config = declared(&agreed(args, serve).await?)?;
                (source::completed(args, config)?, ARGUMENT.to_owned())
            }
        };
        let live = LiveConfig::connect(&config).await;
        let live = live.map_err(|error| source::faulty(&place, &error))?;
        let config = watch::Sender::new(config);
        Ok(Self { live, config })
    }

    /// Reads the file again. After an error the old limits stay in force.
    pub(super) async fn reload(&self, args: &Args, path: &Path) -> Result<(), CommandError> {
        let config = source::read(args, path).await?;
        let reloaded = self.live.reload(&config);
        reloaded.map_err(|error| source::faulty(&path.display().to_string(), &error))?;
        self.config.send_replace(config);
        Ok(())
    }

    pub(super) fn limiter(&self) -> &Limiter {
        self.live.limiter()
    }

    /// A page that asks all replicas of the store.
    pub(super) async fn page(&self) -> Result<Admin, CommandError> {
        let (url, namespace) = source::store(&self.config.borrow());
        let page = if url == "memory:" {
            Admin::of(self.limiter())
        } else {
            let operator = Operator::builder().namespace(&namespace).connect(&url);
            Admin::builder(operator.await?)
        };
        Ok(page.build()?)
    }

    /// The longest wait of a client.
    pub(super) fn wait(&self, name: &str, form: &SlotForm) -> Duration {
        let config = self.config.borrow();
        let declared = || config.limits.get(name)?.wait();
        form.wait.or_else(declared).unwrap_or_default()
    }

    /// The semaphore for a client. Key, tenant, share, value and cost are resolved as in a service with the file.
    pub(super) fn semaphore(&self, name: &str, form: &SlotForm) -> Result<Semaphore, HttpProblem> {
        let limit = (self.live.limit(name)).ok_or_else(|| {
            let detail = format!("there is no limit `{name}`");
            HttpProblem::new(404, "unknown_limit", detail)
        })?;
        let is_fair = (self.config.borrow().limits.get(name))
            .is_some_and(|declared| declared.tenant_source().is_some());
        let is_rate = limit.period().is_some();
        for (parameter, is_given, is_fit, what) in [
            ("tenant", form.tenant.is_some(), is_fair, "not fair"),
            ("share", form.share.is_some(), is_fair, "not fair"),
            ("weight", form.weight.is_some(), !is_rate, "a rate"),
            ("cost", form.cost.is_some(), is_rate, "not a rate"),
        ] {
            if is_given && !is_fit {
                let message = format!("does not apply: limit `{name}` is {what}");
                return Err(HttpProblem::parameter(parameter, message));
            }
        }
        if form.share.is_some() && form.tenant.is_none() {
            return Err(HttpProblem::parameter("share", "needs a `tenant`"));
        }
        let limit = match form.wait {
            Some(wait) => limit.wait_up_to(wait),
            None => limit,
        };
        let semaphore = if is_fair {
            let tenant = form.tenant.as_deref().unwrap_or_default();
            self.live.tenant_semaphore(&limit, &form.key, tenant)
        } else {
            self.live.semaphore(&limit, &form.key)
        };
        let mut semaphore = semaphore.map_err(|error| of_caller(&error))?;
        // The form has checked both ranges.
        let fault = |parameter| move |error| HttpProblem::parameter(parameter, format!("{error}"));
        if let Some(share) = form.share {
            semaphore = semaphore.share(share).map_err(fault("share"))?;
        }
        if let Some(cost) = form.cost {
            semaphore = semaphore.cost(cost).map_err(fault("cost"))?;
        }
        Ok(semaphore.label(form.label.clone()))
    }
}

/// The limit refuses this key or tenant, or requires one.
fn of_caller(error: &ConfigFileError) -> HttpProblem {
    let fault = error.faults().first();
    let is_tenant = fault.is_some_and(|fault| fault.path().ends_with(".fair"));
    let parameter = if is_tenant { "tenant" } else { "key" };
    let message = fault.map_or("", |fault| fault.message());
    HttpProblem::parameter(parameter, message)
}

/// The limits of the arguments, with the values that their other holders have.
async fn agreed<'a>(
    args: &Args,
    serve: &'a ServeArgs,
) -> Result<BTreeMap<&'a str, Declared>, CommandError> {
    // The server declares them itself, once it is connected.
    let asking = Limiter::in_memory();
    let beside = match args.store()? {
        "memory:" => None,
        url => Some(Beside::new(&asking, url, &args.namespace)?),
    };
    let ask = async |LimitArg { name, slots }: &'a LimitArg| {
        let wanted = Wanted {
            slots: *slots,
            is_fair: serve.fair.then_some(true),
            is_forced: serve.force,
            names: ("its slots", "--fair"),
        };
        let declared = match (&beside, slots) {
            (Some(beside), _) => {
                let declared = in_force(beside, name, wanted).await;
                let _ = beside.declare(Registration::Leave, name, None).await;
                declared?
            }
            (None, Some(max)) => Declared {
                max: *max,
                fair: serve.fair,
                adapts: false,
            },
            (None, None) => {
                let message = format!("--limit {name}: write its slots: {name}=8");
                return Err(CommandError::new(code::WRONG_CALL, message));
            }
        };
        Ok((&**name, declared))
    };
    let mut limits = BTreeMap::new();
    for declared in join_all(serve.source.limit.iter().map(ask)).await {
        let (name, declared) = declared?;
        if limits.insert(name, declared).is_some() {
            let message = format!("--limit {name} is given twice");
            return Err(CommandError::new(code::WRONG_CALL, message));
        }
    }
    Ok(limits)
}

/// The file that declares these limits: callers have any key, wait for up to a day, and are refused while the store is
/// down.
fn declared(limits: &BTreeMap<&str, Declared>) -> Result<Config, CommandError> {
    let mut text = "unlimited = true\n".to_owned();
    for (name, Declared { max, fair, .. }) in limits {
        // A string of JSON is one of TOML.
        let name = serde_json::Value::from(*name);
        let _ = write!(
            text,
            "[limits.{name}]\nconcurrent = {max}\nkey = {{ header = 'key' }}\nfair = {fair}\n\
             wait = '24h'\nfallback = 'reject'\nunrouted = true\n"
        );
    }
    Config::from_toml(&text).map_err(|error| source::faulty(ARGUMENT, &error))
}
